"""`ps verify` and `ps snapshot` of the reference implementation's files: the structure is checked, and called no more."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel_synthesis.checkpoint.layout import find_components
from parallel_synthesis.provenance.schema import problems
from pscli.main import call

STEP = "step_checkpoints/step_000000006"
ADAPTER = "judger_lora/adapter_model.safetensors"
Verdict = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def theirs(
    whole: Path,
    reference_run: Callable[..., Path],
    world: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A run of theirs with two checkpoints. Nobody writes into it."""
    return reference_run(whole, tmp_path_factory.mktemp("theirs") / "run", world["flags"], steps=(2, 6))


@pytest.fixture
def copy(theirs: Path, tmp_path: Path) -> Path:
    """One to spoil."""
    return Path(shutil.copytree(theirs, tmp_path / "run", symlinks=True))


@pytest.fixture
def verdict(capsys: pytest.CaptureFixture[str]) -> Verdict:
    def run(*arguments: str | Path) -> dict[str, Any]:
        capsys.readouterr()
        code = call(["verify", *map(str, arguments), "--json"])
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert problems(document, "verify_report") == []
        assert document["exit_code"] == code
        return document

    return run


def names(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_its_structure_is_checked_and_called_that(
    theirs: Path, verdict: Verdict, capsys: pytest.CaptureFixture[str]
) -> None:
    before = names(theirs)
    run = verdict(theirs)
    assert (run["ok"], run["content_checked"], run["manifest"], run["complete"]) == (True, False, None, None)
    assert run["structure_only"] == run["checkpoints"] == ["step_checkpoints/step_000000002", STEP]
    assert run["not_checked"] == ["train.log"]
    one = verdict(theirs / STEP)
    assert one["structure_only"] == ["."]
    assert one["digests"] == {
        "cache_mapper.pt": "structure, CRC-32, finite values",
        "training_state.pt": "structure, CRC-32, finite moments",
        ADAPTER: "header, finite values",
        "judger_lora/adapter_config.json": "schema",
        "checkpoint_meta.json": "schema",
    }
    quick = verdict(theirs / STEP, "--quick")
    assert quick["ok"]
    assert {"structure", "header", "schema"} == set(quick["digests"].values())
    assert call(["verify", str(theirs)]) == 0
    said = capsys.readouterr().out
    assert "there are no recorded hashes, so contents are NOT verified" in said
    assert "--write-manifest" in said
    assert "every byte is" not in said
    assert verdict(theirs, "--full")["exit_code"] == 2  # hashes are asked for, and there are none
    assert verdict(theirs, "--complete")["counts"]["incomplete"] == 1
    assert names(theirs) == before


def in_zip(path: Path, wanted: Callable[[str], bool]) -> None:
    """Flips the last bit of an entry's content."""
    with zipfile.ZipFile(path) as archive:
        entry = max((e for e in archive.infolist() if wanted(e.filename)), key=lambda e: e.file_size)
        with archive.open(entry) as data:
            content = data.read()
    raw = path.read_bytes()
    assert raw.count(content) == 1
    end = raw.index(content) + len(content) - 1
    path.write_bytes(raw[:end] + bytes([raw[end] ^ 1]) + raw[end + 1 :])


def flip_state(step: Path) -> None:
    in_zip(step / "training_state.pt", lambda name: "/data/" in name)


def flip_mapper(step: Path) -> None:
    in_zip(step / "cache_mapper.pt", lambda name: "/data/" in name)


def adapter_nan(step: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(step / ADAPTER)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, step / ADAPTER)


def mapper_inf(step: Path) -> None:
    import torch

    mapper = torch.load(step / "cache_mapper.pt", weights_only=True)
    mapper["net.2.bias"][1] = float("inf")
    torch.save(mapper, step / "cache_mapper.pt")


def no_config(step: Path) -> None:
    (step / "judger_lora/adapter_config.json").unlink()


def no_state(step: Path) -> None:
    (step / "training_state.pt").unlink()


def meta_of_another_step(step: Path) -> None:
    meta = json.loads((step / "checkpoint_meta.json").read_text())
    (step / "checkpoint_meta.json").write_text(json.dumps(meta | {"global_step": 5}))


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(step: Path) -> None:
        import torch

        state = torch.load(step / "training_state.pt", weights_only=False)
        change(state)
        torch.save(state, step / "training_state.pt")

    return spoil


def loop_of(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = state.get("distributed_loop_state") or state["single_loop_state"]
    return found


def streams_of(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = (
        state.get("process_rng_state") or state["rank_state_by_rank"][0]["process_rng_state"]
    )
    return found


def swapped_moments(state: dict[str, Any]) -> None:
    moments = state["optimizer_state"]["state"]
    moments[0], moments[5] = moments[5], moments[0]


def fewer_parameters(state: dict[str, Any]) -> None:
    state["optimizer_state"]["param_groups"][0]["params"].pop()


class Crafted:
    """A call in a pickle."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("/never",)


@pytest.mark.parametrize(
    ("spoil", "path", "status", "detail"),
    [
        (flip_state, "training_state.pt", "digest", "Bad CRC-32"),
        (flip_mapper, "cache_mapper.pt", "digest", "Bad CRC-32"),
        (adapter_nan, ADAPTER, "structure", "1 weights are inf or nan"),
        (mapper_inf, "cache_mapper.pt", "structure", "1 weights are inf or nan"),
        (no_config, "judger_lora/adapter_config.json", "missing", "missing"),
        (no_state, "training_state.pt", "missing", "missing"),
        (meta_of_another_step, "checkpoint_meta.json", "identity", "not of one step"),
        (edited(lambda s: s.update(checkpoint_version=1)), "training_state.pt", "structure", "checkpoint_version"),
        (edited(lambda s: loop_of(s).update(global_step=5)), "training_state.pt", "structure", "as outside"),
        (edited(lambda s: loop_of(s).pop("epoch_idx")), "training_state.pt", "structure", "epoch_idx"),
        (edited(lambda s: streams_of(s).pop("numpy")), "training_state.pt", "structure", "numpy: missing"),
        (edited(swapped_moments), "training_state.pt", "structure", "other shapes"),
        (edited(fewer_parameters), "training_state.pt", "structure", "parameters; the mapper has 4"),
        (edited(lambda s: s.update(evil=Crafted())), "training_state.pt", "structure", "not plain data"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("whole", [4], indirect=True, ids=["ranks4"])
def test_what_does_not_fit_is_found(
    copy: Path, verdict: Verdict, spoil: Callable[[Path], None], path: str, status: str, detail: str
) -> None:
    spoil(copy / STEP)
    found = verdict(copy)
    assert found["exit_code"] == 1
    told = [(p["path"], p["status"]) for p in found["problems"] if detail in p["detail"]]
    assert told == [(f"{STEP}/{path}", status)], found["problems"]
    assert all(p["path"].startswith(STEP) for p in found["problems"])


@pytest.mark.parametrize("whole", [4], indirect=True, ids=["ranks4"])
def test_a_missing_rank(copy: Path, verdict: Verdict) -> None:
    edited(lambda state: state["rank_state_by_rank"].pop(2))(copy / STEP)
    (problem,) = verdict(copy)["problems"]
    assert "expected the ranks 0 to 3" in problem["detail"]


@pytest.mark.parametrize("whole", [4], indirect=True, ids=["ranks4"])
def test_one_of_ours_without_its_manifest_is_never_taken_for_theirs(
    whole: Path, verdict: Verdict, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run, symlinks=True)
    step = run / STEP
    (step / "manifest.json").unlink()
    (problem,) = verdict(run)["problems"]
    assert (problem["path"], problem["status"]) == (f"{STEP}/manifest.json", "missing")
    assert verdict(step)["exit_code"] == 2
    for name in (
        "checkpoint_meta.json",
        "training_state.pt",
    ):  # half removed: the run around it says whose it is
        (step / name).unlink()
        assert verdict(step)["exit_code"] == 2
    lone = tmp_path / "lone"
    shutil.copytree(whole / STEP, lone)
    (lone / "manifest.json").unlink()
    (lone / "checkpoint_meta.json").unlink()
    assert verdict(lone)["exit_code"] == 2  # its training state says so


@pytest.mark.parametrize("whole", [4], indirect=True, ids=["ranks4"])
def test_a_snapshot_is_a_copy_with_a_manifest(
    copy: Path, verdict: Verdict, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link would not do: their writer opens its files anew and so rewrites every name of them."""
    before = names(copy)
    assert call(["snapshot", str(copy)]) == 0
    assert f"kept step 6 as {copy}@mixed_train_step_6, a copy (" in capsys.readouterr().out
    kept = copy / "milestones/mixed_train_step_6"
    assert [name for name in names(copy) if not name.startswith("milestones")] == before
    for path in (copy / STEP).rglob("*"):
        if path.is_file():
            assert (kept / path.relative_to(copy / STEP)).read_bytes() == path.read_bytes()
            assert path.stat().st_nlink == 1
    assert call(["snapshot", str(copy), "--step", "2", "--name", "early"]) == 0
    capsys.readouterr()
    report = verdict(f"{copy}@mixed_train_step_6")
    assert (report["ok"], report["content_checked"], report["structure_only"]) == (True, True, [])
    run = verdict(copy)
    assert run["ok"]
    assert run["structure_only"] == ["step_checkpoints/step_000000002", STEP]
    flip_mapper(copy / STEP)
    assert call(["snapshot", str(copy), "--name", "other"]) == 2
    assert "is damaged and was not kept" in capsys.readouterr().err
    assert call(["snapshot", str(copy), "--export", str(copy.parent / "out")]) == 2
    assert not (copy.parent / "out").exists()
    assert call(["verify", str(copy / STEP), "--write-manifest"]) == 1
    assert "Bad CRC-32" in capsys.readouterr().err


@pytest.mark.parametrize("whole", [4], indirect=True, ids=["ranks4"])
def test_a_manifest_for_an_older_step_does_not_make_it_the_newest(copy: Path, verdict: Verdict) -> None:
    older = copy / "step_checkpoints/step_000000002"
    assert call(["verify", str(older), "--write-manifest", "--quiet"]) == 0
    assert find_components(copy) == (copy / STEP).resolve()
    run = verdict(copy)
    assert (run["ok"], run["content_checked"], run["structure_only"]) == (True, False, [STEP])
    flip_mapper(older)
    assert {(p["path"], p["status"]) for p in verdict(copy)["problems"]} == {
        ("step_checkpoints/step_000000002/cache_mapper.pt", "digest")
    }
