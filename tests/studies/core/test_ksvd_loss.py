"""The four experiments about the KSVD loss show what the page on theory says."""

import pytest

from primal_studies.core.ksvd_loss import LOSSES, descend, first_share, mixing


def test_the_published_loss_reaches_zero_far_from_singular_vectors():
    found = descend(LOSSES[0], steps=500)
    assert found["largest abs J"] < 1e-6
    assert found["KKT residual"][0] > 0.5
    assert found["distinct"] == "0 0 0 0"


@pytest.mark.slow
def test_the_kkt_residual_with_orthogonality_finds_singular_vectors():
    found = descend(LOSSES[2])
    assert found["cosine"][0] > 0.999
    assert found["distinct"] == "3 3 3 3"


def test_static_weights_mix_no_tokens_and_data_weights_lose_the_sign():
    assert mixing("static", False)["other tokens"] == 0
    assert mixing("static", True)["other tokens"] > 0
    assert mixing("data", False)["under x → -x"] == "even"
    assert mixing("dual", False)["under x → -x"] == "odd"
    assert mixing("dual", True)["later tokens"] == 0


def test_an_untrained_layer_already_concentrates_its_spectrum():
    together = first_share(0.5, is_centred=False)
    assert together["primal"] > together["softmax"] > together["cosine"]
    assert first_share(0.0, is_centred=False)["primal"] < together["primal"] / 3
