"""A graph as JSON: what is no graph is refused in a sentence."""

import pytest

from primal_attention.analysis.causes.pag import PAG
from primal_attention.support.command import UserError


@pytest.mark.raw
@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "[" * 100_000,
        "{}",
        '{"marks": null, "names": null}',
        '{"marks": "ab", "names": null}',
        '{"marks": [[0, 0.9], [0.9, 0]], "names": null}',
        '{"marks": [[0, 258], [257, 0]], "names": null}',
        '{"marks": [[false, true], [true, false]], "names": null}',
        '{"marks": [[0, 1], [1]], "names": null}',
        '{"marks": [[0, 1], [0, 0]], "names": null}',
        '{"marks": [[0]], "names": "a"}',
        '{"marks": [[0]], "names": [1]}',
        '{"marks": [[0]], "names": null, "warnings": 5}',
    ],
)
def test_a_text_that_is_no_graph_is_refused(text):
    with pytest.raises(UserError, match=r"^the graph"):
        PAG.from_json(text)


def test_a_graph_without_nodes_survives():
    empty = PAG.from_json('{"marks": [], "names": null}')
    assert PAG.from_json(empty.to_json()) == empty
