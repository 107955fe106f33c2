"""Every kind of page: names of a user run no code, and the policy forbids what is not ours."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.report.pages import PAYLOADS, check_page

from primal_attention.cli.main import main
from primal_attention.report import Card, Report, add_cards

IMG, SCRIPT, QUOTE, STYLE = PAYLOADS
QUICK = [
    *("--model.dim", "16", "--model.num-heads", "2", "--model.num-layers", "1"),
    *("--training.epochs", "1"),
]
STEPS = ["--training.min-steps", "4"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PRIMAL_DATA", raising=False)


def page_of(folder: str) -> str:
    return Path(folder, "report.html").read_text("utf-8")


def test_every_part_of_a_page_is_escaped():
    report = Report(IMG, SCRIPT).section(SCRIPT).section(IMG).subsection(STYLE).text(QUOTE)
    report.verdict(IMG).caution(SCRIPT).tiles({QUOTE: IMG, STYLE: QUOTE}, 4).config({STYLE: QUOTE})
    report.table([QUOTE, STYLE], [[SCRIPT, IMG]] * 41).figure(b"png", SCRIPT)
    add_cards(report, [Card(b"png", QUOTE), Card(None, SCRIPT)], heading=STYLE)
    outer = Report("Outer").include(IMG, report)
    for page in (report, outer):
        assert not check_page(page.html(), *PAYLOADS).scripts


@pytest.mark.parametrize("harm", [*PAYLOADS[:2], '<p style="color:red">', '<a href="//x">x</a>'])
def test_the_reader_of_these_tests_finds_unescaped_words(harm):
    with pytest.raises(AssertionError):
        check_page(Report("A").fragment(harm).html())


def test_the_policy_knows_the_scripts_of_the_page_only():
    report = Report("A").assets(style="p{color:red}", script="let a = 1").assets(script="let a = 1")
    assert check_page(Report("B").include("A", report).html()).scripts == ["let a = 1"]


def test_a_run_on_a_table():
    pd = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({SCRIPT: rng.normal(size=60), QUOTE: rng.choice([IMG, STYLE], 60)})
    frame["kind"] = np.where(frame[SCRIPT] > 0, IMG, SCRIPT)
    frame.rename(columns={"kind": STYLE}).to_csv(f"{IMG}.csv", index=False)
    sizes = ["--model.dim", "8", "--model.row-dim", "16", *QUICK[2:], "--training.epoch-steps", "5"]
    command = ["train", "--task", "tables", f"{IMG}.csv", "--target", STYLE]
    assert main([*command, *sizes, "--out", "run"]) == 0
    check_page(page_of("run"), *PAYLOADS)


def test_a_run_on_series_and_on_texts():
    labels = ("<svg/onload=alert(1)>", "</style>")
    rng = np.random.default_rng(0)
    head = ["@problemName <b>", "@univariate true", f"@classLabel true {' '.join(labels)}", "@data"]
    rows = [",".join(f"{v:.3f}" for v in rng.normal(size=8)) for _ in range(24)]
    lines = [f"{row}:{labels[i % 2]}" for i, row in enumerate(rows)]
    Path(f"{IMG}.ts").write_text("\n".join([*head, *lines]) + "\n")
    assert main(["train", f"{IMG}.ts", *QUICK, "--out", "run"]) == 0
    check_page(page_of("run"), IMG)
    texts = [{"text": f"{STYLE} {i}", "label": PAYLOADS[i % 4]} for i in range(24)]
    Path(f"{QUOTE}.jsonl").write_text("\n".join(map(json.dumps, texts)) + "\n")
    assert main(["train", f"{QUOTE}.jsonl", *QUICK, "--out", "texts"]) == 0
    check_page(page_of("texts"), QUOTE)


def test_a_run_on_events():
    rng = np.random.default_rng(0)
    header = ["user", "time", "type", QUOTE]
    lines = [",".join(header)]
    for user in range(20):
        times = np.cumsum(rng.exponential(3, 8))
        lines += [f"{user},{t:.3f},{PAYLOADS[::2][i % 2]},{i}" for i, t in enumerate(times)]
    Path(f"{IMG}.csv").write_text("\n".join(lines) + "\n")
    command = ["train", "--task", "events", f"{IMG}.csv", "--data.marks", QUOTE]
    assert main([*command, *QUICK, *STEPS, "--out", "run"]) == 0
    check_page(page_of("run"), IMG)


def test_a_run_on_pairs_and_a_search():
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    Path("pictures").mkdir()
    rows = ["image,caption"]
    for i in range(24):
        pixels = rng.integers(0, 255, (16, 16, 3)).astype(np.uint8)
        image.fromarray(pixels).save(f"pictures/{IMG}{i}.png")
        caption = PAYLOADS[i % 4].replace('"', '""')
        rows.append(f'{IMG}{i}.png,"{caption}"')
    Path(f"{QUOTE}.csv").write_text("\n".join(rows) + "\n")
    sizes = [*QUICK, *STEPS, "--size", "16", "--model.parser-layers", "1"]
    command = ["train", "--task", "pairs", f"{QUOTE}.csv", "--images", "pictures"]
    assert main([*command, *sizes, "--out", "run"]) == 0
    check_page(page_of("run"), QUOTE, IMG, STYLE)
    assert (
        main(["search", "run/softmax", SCRIPT, IMG, "--images", "pictures", "--out", "s.html"]) == 0
    )
    words = check_page(Path("s.html").read_text("utf-8"), SCRIPT).words
    assert any(IMG in word and ".png" in word for word in words)


def test_a_page_of_lists():
    from primal_attention.datasets.lists import make_curves

    image = pytest.importorskip("PIL.Image")
    x, groups = make_curves(6, 10, seed=5)
    np.savez(f"{IMG}.npz", queries=x[:3], gallery=x, query_groups=groups[:3], gallery_groups=groups)
    for i in range(60):
        image.new("L", (8, 8), 4 * i).save(f"{IMG}{i}.png")
    command = ["rerank", f"{IMG}.npz", "--results", "20", "--report", "page.html"]
    assert main([*command, "--images", f"{IMG}{{id}}.png"]) == 0
    check_page(Path("page.html").read_text("utf-8"), IMG)


def test_a_run_on_numbers_of_series_and_on_labels_of_events():
    rng = np.random.default_rng(0)
    head = [f"@problemName {IMG}", "@univariate true", "@targetLabel true", "@data"]
    rows = [",".join(f"{v:.3f}" for v in rng.normal(size=8)) for _ in range(24)]
    lines = [f"{row}:{i / 7:.3f}" for i, row in enumerate(rows)]
    Path(f"{IMG}.ts").write_text("\n".join([*head, *lines]) + "\n")
    assert main(["train", f"{IMG}.ts", *QUICK, "--out", "numbers"]) == 0
    check_page(page_of("numbers"), IMG)
    lines = [f"user,time,type,{QUOTE}"]
    for user in range(20):
        times = np.cumsum(rng.exponential(3, 6))
        lines += [f"{user},{t:.3f},{PAYLOADS[0]},{PAYLOADS[::3][user % 2]}" for t in times]
    Path(f"{STYLE.replace('/', '')}.csv").write_text("\n".join(lines) + "\n")
    command = ["train", "--task", "event-labels", f"{STYLE.replace('/', '')}.csv"]
    assert main([*command, "--target", QUOTE, *QUICK, *STEPS, "--out", "labels"]) == 0
    check_page(page_of("labels"), QUOTE)


def test_pages_of_results_in_python():
    from primal_attention.analysis.counts.association import Association
    from primal_attention.analysis.counts.probe import CountsResult, HeadAssociation
    from primal_attention.analysis.depth import plan
    from primal_attention.analysis.flow import modality_flow
    from primal_attention.analysis.spectrum import LayerSpectrum, SpectrumResult
    from primal_attention.analysis.transport import LayerTransport, TransportResult, map_metrics

    ids = torch.tensor([[0, 0, 1, 1, 1, 1]])
    moved = map_metrics(torch.randn(9, 2), torch.randn(9, 2))
    association = Association(*[0.3] * 6, 0.1, 0.0, 0.1, 0.1)
    results = {
        IMG: modality_flow([torch.full((1, 2, 6, 6), 1 / 6)], ids, names=[IMG, SCRIPT]),
        QUOTE: TransportResult([LayerTransport(QUOTE, moved, moved)]),
        STYLE: SpectrumResult([LayerSpectrum(STYLE, torch.rand(2, 2, 4), None)]),
        SCRIPT: CountsResult(
            (HeadAssociation(SCRIPT, 0, 1, association),), (IMG, QUOTE), (3, 3), 1.0, corpus=STYLE
        ),
        "layers": plan("30M"),
    }
    for shown, result in results.items():
        result.to_html("result.html")
        check_page(Path("result.html").read_text("utf-8"), shown)


@pytest.fixture
def critic():
    """A classifier whose classes and words are payloads, in a folder with such a name."""
    transformers = pytest.importorskip("transformers")
    words = ["<svg", "onload=alert(1)>", "<script>alert(1)</script>", '"onfocus="alert(1)', "good"]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    folder = Path(IMG)
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    names = dict(enumerate((SCRIPT, STYLE)))
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        id2label=names,
        label2id={name: i for i, name in names.items()},
    )
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    split = {"do_lower_case": False, "do_basic_tokenize": False, "do_split_on_punc": False}
    transformers.BertTokenizer(str(folder / "vocab.txt"), **split).save_pretrained(folder)
    lines = [" ".join(words[(i + j * j) % len(words)] for j in range(8)) for i in range(6)]
    Path(f"{STYLE.replace('/', '')}.txt").write_text("\n".join(lines) + "\n")
    return IMG, f"{STYLE.replace('/', '')}.txt"


def test_pages_about_a_model(critic):
    model, data = critic
    quick = ["--advice.attentions", "linear", "--causes.inputs", "1", "--causes.alpha", "0.4"]
    assert main(["analyze", model, "--data", data, "--out", "all", *quick]) == 0
    reader = check_page(page_of("all"), data)
    assert len(reader.scripts) == 1
    record = json.loads(Path("all", "analyze.json").read_text("utf-8"))
    assert {"spectrum", "advice", "depth", "causes"} <= set(record["verdicts"])
    for name in ("spectrum", "causes", "advice", "depth"):
        given = {"depth": [], "causes": ["--data", data, *quick[2:]]}.get(name, ["--data", data])
        assert main(["analyze", model, name, *given, "--out", f"{name}.html"]) == 0
        check_page(Path(f"{name}.html").read_text("utf-8"))
    shown = check_page(Path("causes.html").read_text("utf-8"))
    assert SCRIPT in "".join(shown.words) or STYLE in "".join(shown.words)
    assert main(["convert", model, "--data", data, "--out", "new"]) == 0
    check_page(page_of("new"), data)
