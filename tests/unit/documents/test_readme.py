"""The examples of the README and of the pages run unchanged, and their links are valid."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import kernel_sources
import pytest
import safetensors.torch
import torch
from torch.nn.functional import linear

import offload

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
GUIDES = DOCS / "guides"
PAGES = (README, *sorted(DOCS.rglob("*.md")))

# The test that runs each page's examples.
TESTED = {
    "README.md": "test_five_minutes",
    "fusion.md": "test_fusion",
    "llm_decoding.md": "tests/unit/documents/test_llm_decoding.py",
    "own_kernels.md": "tests/backends/ascend/test_ascend_binary_kernels.py",
    "pipelines.md": "test_pipelines",
    "placement.md": "test_placement",
    "quickstart.md": "test_quickstart",
    "ranks.md": "test_ranks",
    "saving.md": "test_saving",
    "servers.md": "test_servers",
    "streaming.md": "test_streaming",
    "timelines.md": "test_timelines",
    "training.md": "test_training",
    "varying_lengths.md": "test_varying_lengths",
}


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def fragments_of(page: Path) -> list[str]:
    """Examples that need names from elsewhere, and the ranks of a process group."""
    return re.findall(r"```python ranks\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.fixture
def run_page(tmp_path, monkeypatch):
    """Run a page's examples in order, in a separate folder; return their names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(page: Path) -> dict[str, object]:
        names: dict[str, object] = {"__name__": page.stem}
        for block in blocks_of(page):
            exec(compile(block, str(page), "exec"), names)
        return names

    return run


def test_five_minutes(run_page, capsys):
    names = run_page(README)
    printed = capsys.readouterr().out
    assert "aten::addmm" in printed
    assert "words patched" in printed
    captured, again, x = names["captured"], names["again"], names["x"]
    assert isinstance(captured, offload.Captured)
    assert isinstance(again, offload.Captured)
    expected = captured(x)
    assert names["y"].equal(expected)
    assert names["out"].equal(expected)
    assert again(x).equal(expected)
    assert names["y_eager"].equal(expected)
    assert names["block"](x).equal(expected)
    assert names["y_compiled"].equal(expected)


def test_quickstart(run_page, tmp_path, capsys):
    names = run_page(DOCS / "quickstart.md")
    printed = capsys.readouterr().out
    assert "aten::addmm" in printed
    assert "m_l_t" in printed
    assert names["run"].closed
    assert names["y"].equal(names["expected"])
    assert (tmp_path / "classifier.offload").exists()


@kernel_sources.needs_compiler
def test_fusion(run_page, capsys):
    names = run_page(GUIDES / "fusion.md")
    printed = capsys.readouterr().out
    assert "fused: 2 kernels in place of 3 recorded launches" in printed
    assert names["run"].fusion.n_kernels == 2
    assert {report.mode for report in names["run"].launch_reports()} == {"kernel"}


def test_pipelines(run_page, capsys):
    names = run_page(GUIDES / "pipelines.md")
    printed = capsys.readouterr().out
    assert printed.count("torch.Size([4, 8])") == 20
    assert "3 have ended" in printed
    assert names["d"].done()
    assert len(names["results"]) == 10
    assert len(names["answers"]) == 11
    assert names["run"].closed


def test_placement(run_page, capsys):
    names = run_page(GUIDES / "placement.md")
    printed = capsys.readouterr().out
    assert "embed" in printed
    assert "segment 0 on cpu#" in printed
    assert "lanes=2: " in printed
    assert names["run"].lane_choice.asked == 2
    # The towers are independent of each other, and the sum waits for the other lane's.
    assert names["schedule"].lane_of == (0, 0, 1, 1, 0)
    assert names["schedule"].n_waits == 1
    assert names["schedule"].predicted_ns < sum(names["launch_ns"])


def test_timelines(run_page, tmp_path, capsys):
    names = run_page(GUIDES / "timelines.md")
    assert "predicted" in capsys.readouterr().out
    assert [one.scheduling for one in names["both"].executions] == ["host", "offload"]
    for name in ("timeline.json", "timeline.svg", "timeline.html"):
        assert (tmp_path / name).stat().st_size > 1000
    assert list((tmp_path / "offload").glob("costs-cpu-*.json"))


def test_streaming(run_page, tmp_path, capsys):
    names = run_page(GUIDES / "streaming.md")
    printed = capsys.readouterr().out
    assert "least budget" in printed
    assert "of weights streamed at" in printed
    run, x, y = names["run"], names["x"], names["y"]
    assert run.streaming.plan.memory_bytes <= 4 * 2**20
    weights = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    expected = x
    for index in range(16):
        expected = linear(expected, weights[f"{index}.weight"], weights[f"{index}.bias"])
    torch.testing.assert_close(y, expected)
    run.streaming.replace({f"15.{name}": weights[f"15.{name}"] * 0 for name in ("weight", "bias")})
    assert run(x).count_nonzero() == 0


# The page forks a process in which torch's and the pool's threads have been started.
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_servers(run_page, capsys):
    names = run_page(GUIDES / "servers.md")
    printed = capsys.readouterr().out
    assert "expected float32[1, 64], got float32[3, 64]" in printed
    assert "index 9 is out of bounds" in printed
    assert names["answer"].shape == (1, 8)
    assert len(names["answers"]) == 200
    assert names["child"].exitcode == 0
    assert names["service"](names["example"]).equal(names["expected"])
    assert names["run"].closed


def test_a_pool_that_is_full_refuses(run_page):
    names = run_page(GUIDES / "servers.md")
    pool = names["Pool"](names["captured"], (names["example"],), n_workers=1, n_waiting=2)
    held = pool._idle.get()  # no worker continues
    admitted = [pool.submit(names["example"]) for _ in range(3)]
    with pytest.raises(names["Overloaded"]):
        pool.submit(names["example"])
    pool._idle.put(held)
    assert all(one.result().equal(names["expected"]) for one in admitted)
    assert pool.submit(names["example"]).result().equal(names["expected"])
    pool.close()
    assert held.closed


def test_varying_lengths(run_page, capsys):
    names = run_page(GUIDES / "varying_lengths.md")
    buckets = names["buckets"]
    printed = capsys.readouterr().out.splitlines()
    assert "dim 2 <= n <= 512 (recorded at 9)" in printed[1]
    assert any(line.startswith("1 instance of") for line in printed)
    lengths = [int(line.split()[0]) for line in printed[-3:]]
    assert lengths == buckets.lengths == [16, 32, 64]
    # One execution was the warm-up; requests of 1 and 16 tokens, and one in another arena.
    assert [run.last_execution.n_executions for run in buckets.runs] == [4, 2, 2]
    with pytest.raises(ValueError, match="65 tokens are more than 64"):
        buckets(torch.zeros(1, 65, dtype=torch.long))


def test_training(run_page, capsys):
    names = run_page(GUIDES / "training.md")
    printed = capsys.readouterr().out
    assert "param_groups[0]['weight_decay']: expected 0.01, with which" in printed
    assert len(names["losses"]) == 7
    assert names["made"].recorded_result > names["losses"][-1]
    first = next(iter(names["model"].parameters()))
    # The learning rate was halved twice in the four steps after the captured one.
    assert names["rate"] == torch.tensor(1e-3) / 4
    assert names["optimizer"].state[first]["step"] == 5
    assert not torch.equal(names["mean"].module[0].weight, first)


def test_saving(run_page, tmp_path, capsys):
    with pytest.warns(UserWarning, match=r"types=\[Scores\]"):
        names = run_page(GUIDES / "saving.md")
    assert "a generator of its own" in capsys.readouterr().out
    assert not (tmp_path / "noisy.offload").exists()
    assert (tmp_path / "model.offload").exists()
    with pytest.raises(offload.CaptureError):
        _ = names["opened"].recorded_result
    with pytest.raises(offload.CopyError):
        names["captured"].__reduce_ex__(2)


def torchrun(arguments: str, folder: Path) -> str:
    """Run by torchrun in a folder; return what was printed."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments.split()],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_ranks(tmp_path):
    """By two processes as the page describes, and then by its commands."""
    (script,) = blocks_of(GUIDES / "ranks.md")
    (tmp_path / "model.py").write_text(script)
    commands = re.findall(r"^torchrun (.*)$", (GUIDES / "ranks.md").read_text(), re.MULTILINE)
    torch.manual_seed(1)
    x = torch.randn(8, 64)
    safetensors.torch.save_file({"args[0]": x}, tmp_path / "x.safetensors")

    assert "_c10d_functional::all_reduce" in torchrun("--nproc-per-node 2 model.py", tmp_path)
    run, doctor = (torchrun(command, tmp_path) for command in commands)
    assert run.count("result0: float32[8, 64]") == 2
    results = [
        safetensors.torch.load_file(tmp_path / f"y.safetensors.rank{rank}of2")["result0"]
        for rank in range(2)
    ]
    assert torch.equal(*results)
    assert "rank 0 of 2" in doctor
    assert "rank 1 of 2" in doctor


# Before and after each fragment for ranks: the names that it needs, and what it must have done.
AROUND_FRAGMENTS = {
    "ranks.md": (
        (
            "from torch.distributed.pipelining import PipelineStage\n"
            "stage, microbatch = model[rank], torch.randn(4, 8)\n",
            "assert torch.equal(Captured(stage, microbatch)(microbatch), stage(microbatch))\n",
        ),
        (
            "x0, x1, x2, x3 = inputs = torch.randn(4, 4, 8)\nmicro_batch = x0\n",
            "assert rank == 1 or results is None\n"
            "assert rank == 0 or all(map(torch.equal, results, map(model, inputs)))\n",
        ),
        (
            "torch.set_grad_enabled(True)\n"
            "group, loss_fn = dist.group.WORLD, torch.nn.functional.mse_loss\n"
            "optimizer = torch.optim.AdamW(model.parameters())\n"
            "xs, targets = torch.randn(2, 4, 8), torch.randn(2, 4, 8)\n"
            "batches, before = [(xs, targets)] * 3, model[0].weight.clone()\n",
            "assert (loss is None) == (rank == 0)\n"
            "assert rank == 0 or loss.isfinite()\n"
            "assert not torch.equal(model[0].weight, before)\n"
            "assert rank == 1 or torch.load('state.pt')[0].keys() == model.state_dict().keys()\n"
            "torch.set_grad_enabled(False)\n",
        ),
    ),
    "timelines.md": (
        (
            "x = torch.randn(4, 8)\nrun = offload.capture(model, x).load()\nrun(x)\n",
            "assert (ranks is None) == (rank == 1)\nassert rank == 1 or len(ranks.ranks) == 2\n",
        ),
    ),
}


@pytest.mark.skipif(
    not hasattr(torch.ops._c10d_functional, "isend"), reason="stages need messages of torch 2.13"
)
def test_fragments_for_ranks(tmp_path):
    """All of them, one after the other, by two processes."""
    script = (
        "import torch, torch.distributed as dist, offload\n"
        "dist.init_process_group('gloo')\n"
        "rank, n_stages = dist.get_rank(), dist.get_world_size()\n"
        "torch.manual_seed(0)\n"
        "torch.set_grad_enabled(False)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))\n"
    )
    for name, around in AROUND_FRAGMENTS.items():
        fragments = fragments_of(GUIDES / name)
        for fragment, (before, after) in zip(fragments, around, strict=True):
            script += before + fragment + after
    (tmp_path / "fragments.py").write_text(script + "dist.destroy_process_group()\n")
    torchrun("--nproc-per-node 2 fragments.py", tmp_path)
    assert (tmp_path / "ranks.json").stat().st_size > 0


def test_every_example_runs_in_a_test():
    assert {page.name for page in PAGES if fragments_of(page)} == AROUND_FRAGMENTS.keys()
    kinds = {kind for page in PAGES for kind in re.findall(r"^```(.+)$", page.read_text(), re.M)}
    assert kinds == {"python", "python ranks", "sh"}
    assert {page.name for page in PAGES if blocks_of(page)} == TESTED.keys()
    assert all(name in globals() or (ROOT / name).exists() for name in TESTED.values())


def test_the_readme_is_short_and_in_order():
    text = README.read_text()
    assert len(text.splitlines()) <= 200
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles == [
        "Two commands",
        "The whole in a picture",
        "Five minutes",
        "How fast",
        "Limits",
        "Where to read on",
    ]
    table = re.findall(r"^\|.*×.*\|$", text, re.MULTILINE)
    assert table, "the table of measurements is published"


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = [one for one in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in one]
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def test_every_page_is_in_the_index():
    index = (DOCS / "index.md").read_text()
    for page in DOCS.rglob("*.md"):
        path = page.relative_to(DOCS).as_posix()
        assert path == "index.md" or f"]({path}" in index, path


def test_the_design_is_one_page_of_300_lines():
    assert len((DOCS / "design.md").read_text().splitlines()) <= 300


def test_make_has_the_targets_that_pages_name():
    named = {one for page in PAGES for one in re.findall(r"`make ([a-z-]+)`", page.read_text())}
    listed = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert named <= {line.split()[0] for line in listed.stdout.splitlines()}
