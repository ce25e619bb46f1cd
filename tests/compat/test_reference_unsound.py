"""Training states that can not be gone on from: `ps verify` names them, `ps resume --out` refuses them and makes nothing."""

from __future__ import annotations

import json
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel_synthesis.provenance.schema import problems
from pscli.main import call

STEP = "step_checkpoints/step_000000006"
STATE = "training_state.pt"
ADAPTER = "judger_lora/adapter_model.safetensors"
CONFIG = "judger_lora/adapter_config.json"
Change = Callable[[dict[Any, Any]], Any]
FOUR_RANKS = pytest.mark.parametrize("whole", [4], indirect=True, ids=["ranks4"])


@pytest.fixture(scope="module")
def theirs(
    whole: Path,
    reference_run: Callable[..., Path],
    world: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A run of theirs with one checkpoint. Nobody writes into it."""
    return reference_run(whole, tmp_path_factory.mktemp("theirs") / "run", world["flags"], steps=(6,))


class Judged:
    """What both commands say of a copy of the run."""

    def __init__(self, run: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.run, self.step = run, run / STEP
        self._root, self._capsys = root, capsys

    def verify(self) -> list[str]:
        """The problems, as path: detail."""
        self._capsys.readouterr()
        code = call(["verify", str(self.run), "--json"])
        document = json.loads(self._capsys.readouterr().out)
        assert problems(document, "verify_report") == []
        assert code == document["exit_code"] == (1 if document["problems"] else 0)
        return [f"{p['path'].removeprefix(STEP + '/')}: {p['detail']}" for p in document["problems"]]

    def refused(self, *more: str) -> str:
        """What a resume says that makes nothing at all."""
        out = self.run.parent / "ours"
        before = sorted(self.run.parent.rglob("*"))
        arguments = ["resume", str(self.run), "--out", str(out), "--set", f"data.root={self._root}", *more]
        assert call(arguments) == 2
        assert sorted(self.run.parent.rglob("*")) == before
        return self._capsys.readouterr().err


@pytest.fixture
def judged(theirs: Path, world: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Judged:
    run = Path(shutil.copytree(theirs, tmp_path / "run", symlinks=True))
    return Judged(run, world["root"], capsys)


def edited(change: Change) -> Callable[[Path], None]:
    def spoil(step: Path) -> None:
        import torch

        state = torch.load(step / STATE, weights_only=False)
        change(state)
        torch.save(state, step / STATE)

    return spoil


def loop(**values: Any) -> Callable[[Path], None]:
    return edited(lambda state: state["distributed_loop_state"].update(values))


def streams(**values: Any) -> Callable[[Path], None]:
    return edited(lambda state: state["rank_state_by_rank"][1]["process_rng_state"].update(values))


def moments(change: Change) -> Callable[[Path], None]:
    return edited(lambda state: change(state["optimizer_state"]["state"]))


def group(**values: Any) -> Callable[[Path], None]:
    return edited(lambda state: state["optimizer_state"]["param_groups"][0].update(values))


def dag(depth: int) -> Any:
    """A list of two lists that are the same, and so on: 2**depth numbers when it is printed."""
    value: Any = [1]
    for _ in range(depth):
        value = [value, value]
    return value


def tensor(*shape: int, dtype: str = "uint8") -> Any:
    import torch

    return torch.zeros(*shape, dtype=getattr(torch, dtype))


def moments_of_swapped_modules(found: dict[Any, Any]) -> None:
    """q_proj's and k_proj's factors B, of a layer: other shapes in the model's order, the same ones in any."""
    shapes = [tuple(found[number]["exp_avg"].shape) for number in range(len(found))]
    first = 4 + 1
    other = next(n for n in range(first, len(found)) if shapes[n] != shapes[first])
    found[first], found[other] = found[other], found[first]


def adapter_of_whole_numbers(step: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(step / ADAPTER)
    save_file({name: value.to(torch.int8) for name, value in tensors.items()}, step / ADAPTER)


def configured(**values: Any) -> Callable[[Path], None]:
    def spoil(step: Path) -> None:
        config = json.loads((step / CONFIG).read_text())
        (step / CONFIG).write_text(json.dumps(config | values))

    return spoil


def of_epoch(epoch: int) -> Callable[[Path], None]:
    def spoil(step: Path) -> None:
        path = step / "checkpoint_meta.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"epoch": epoch}))

    return spoil


def bomb(step: Path) -> None:
    with zipfile.ZipFile(step / STATE, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/bomb", bytes(1 << 25))


def first_rank_twice(state: dict[str, Any]) -> None:
    state["rank_state_by_rank"][1] = state["rank_state_by_rank"][0]


def negative_squares(found: dict[Any, Any]) -> None:
    found[2]["exp_avg_sq"].fill_(-1.0)


NAN, HUGE = float("nan"), 10**6000
CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    # Moments
    "a parameter without moments": (moments(lambda m: m.pop(3)), f"{STATE}: optimizer_state.state[3]: missing"),
    "no mean square": (moments(lambda m: m[3].pop("exp_avg_sq")), "state[3].exp_avg_sq: expected a tensor of F32"),
    "no moments at all": (moments(lambda m: m.clear()), "state[0]: missing"),
    "moments of another parameter": (moments(moments_of_swapped_modules), "other shapes than the parameters"),
    "nan moments": (moments(lambda m: m[0]["exp_avg"].fill_(NAN)), "numbers of the moments are inf or nan"),
    "negative mean squares": (moments(negative_squares), "mean squares or steps are negative"),
    "half moments": (moments(lambda m: m[3].update(exp_avg=m[3]["exp_avg"].half())), "found a tensor of F16"),
    "a moment of a deep value": (moments(lambda m: m[3].update(more=dag(60))), "holds more than moments"),
    "lr nan": (group(lr=NAN), "lr: expected a finite number of at least 0, found nan"),
    "params a number": (group(params=5), "params: expected the numbers of its parameters, found 5"),
    "params lists": (group(params=[[1]] * 28), "params: expected the numbers of its parameters"),
    "settings a deep value": (group(more=dag(60)), "holds more than AdamW's settings"),
    # Ranks
    "another world size": (loop(world_size=3 * 10**6), "expected the ranks 0 to 2999999, found 0, 1, 2, 3"),
    "world size -1": (loop(world_size=-1), "world_size: expected the number of ranks, found -1"),
    "world size True": (loop(world_size=True), "world_size: expected the number of ranks, found True"),
    "one rank twice": (edited(first_rank_twice), "rank_state_by_rank[1]: is the state of rank 0"),
    "a huge rank": (
        edited(lambda s: s.update(rank_state_by_rank={HUGE: 1})),
        "a whole number of 19,932 bits; no counter is as large",
    ),
    # Random streams
    "python None": (streams(python=None), "python: expected Python's random state (random.getstate()), found None"),
    "numpy a text": (streams(numpy="x"), "numpy: expected numpy's random state"),
    "torch_cpu of 3 bytes": (streams(torch_cpu=tensor(3)), "expected a tensor of 5056 bytes, found a tensor of U8 [3]"),
    "torch_cpu of nothing": (streams(torch_cpu=tensor(5056)), "torch_cpu: 1 states are not of torch's generator"),
    "torch_cuda of 3 bytes": (streams(torch_cuda=[tensor(3)]), "torch_cuda: expected None, a tensor of 16 bytes"),
    # Counters
    "an epoch's state cut short": (
        loop(current_epoch_rng_state_before_build=(3, (1, 2), None)),
        "current_epoch_rng_state_before_build: expected Python's random state, found a tuple of 3",
    ),
    "beyond the epoch": (loop(next_batch_idx_in_epoch=10**12), "step 6 can not be step 1000000000000 of epoch_idx 1"),
    "foreign tasks": (loop(tasks=["x"]), "counts 'flan', which is not among the run's tasks"),
    "no partial sums": (loop(current_epoch_partial=None), "epoch_attempted_sync_steps_local: missing"),
    "no counter of updates": (
        edited(lambda s: s["distributed_loop_state"].pop("optimizer_sync_steps_local")),
        "optimizer_sync_steps_local: missing",
    ),
    "a deep epoch": (loop(epoch_idx=dag(60)), "epoch_idx: expected a whole number, found a list of 2"),
    "a huge epoch": (loop(epoch_idx=-(10**5000)), "a whole number of 16,610 bits"),
    "deep summaries": (loop(epoch_summaries=[{"epoch": dag(60)}]), "epoch_summaries: expected a list of each epoch's"),
    "a deep version": (
        edited(lambda s: s.update(checkpoint_version=dag(60))),
        "checkpoint_version: expected 2, found a list of 2",
    ),
    "a huge version": (edited(lambda s: s.update(checkpoint_version=HUGE)), "a whole number of 19,932 bits"),
    "a huge step": (edited(lambda s: s.update(global_step=HUGE)), "a whole number of 19,932 bits"),
    # Beside it
    "epoch 9": (of_epoch(9), "checkpoint_meta.json: is of epoch 9; training_state.pt stands in epoch 2"),
    "int8 LoRA": (adapter_of_whole_numbers, "is of I8; expected floating-point weights"),
    "alpha nan": (configured(lora_alpha=NAN), f"{CONFIG}: lora_alpha is nan; expected a finite number"),
    "DoRA": (configured(use_dora=True), f"{CONFIG}: use_dora is 'True'; expected False"),
    "biases": (configured(bias="all"), f"{CONFIG}: bias is 'all'; expected 'none'"),
    "rsLoRA": (configured(use_rslora=True), f"{CONFIG}: use_rslora: expected False, found True"),
    "a bomb": (bomb, f"{STATE}: holds an entry 'archive/bomb' of 33,554,432 bytes, which torch does not write"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@FOUR_RANKS
def test_both_commands_say_the_same(judged: Judged, case: str) -> None:
    spoil, told = CASES[case]
    spoil(judged.step)
    found = judged.verify()
    assert any(told in problem for problem in found), found
    said = judged.refused()
    assert "can not be continued from" in said and told in said


@pytest.mark.parametrize("whole", [1], indirect=True, ids=["ranks1"])
def test_a_single_process(judged: Judged) -> None:
    assert judged.verify() == []
    edited(lambda state: state["single_loop_state"].update(per_task_steps={"flan": -4}))(judged.step)
    (problem,) = judged.verify()
    assert "single_loop_state.per_task_steps: expected a count for each task" in problem
    assert problem in judged.refused()


@FOUR_RANKS
def test_what_only_the_settings_tell(judged: Judged) -> None:
    """Sound by itself, of another run: refused before anything is made too."""

    def renamed(state: dict[str, Any]) -> None:
        state["distributed_loop_state"]["tasks"] = ["ultrachat", "wildchat"]
        for rank in state["rank_state_by_rank"].values():
            for key in ("per_task_steps_local", "per_task_seen_samples_local"):
                rank[key] = {"ultrachat" if name == "flan" else name: n for name, n in rank[key].items()}

    assert "expected 4 with run.components = mapper_only" in judged.refused(
        "--set", "run.components=mapper_only"
    )
    edited(renamed)(judged.step)
    assert judged.verify() == []
    assert "its tasks are ultrachat, wildchat, those here are flan, wildchat" in judged.refused()


@FOUR_RANKS
def test_numbers_of_numpys_are_numbers(judged: Judged) -> None:
    import numpy as np

    def change(state: dict[str, Any]) -> None:
        state["global_step"] = np.int64(state["global_step"])
        state["distributed_loop_state"]["epoch_idx"] = np.int32(1)
        ranks = state["rank_state_by_rank"]
        state["rank_state_by_rank"] = {str(rank): saved for rank, saved in ranks.items()}

    edited(change)(judged.step)
    assert judged.verify() == []
    edited(lambda state: state["distributed_loop_state"].update(epoch_idx=np.int32(-1)))(judged.step)
    assert any("epoch_idx: expected a whole number, found -1" in problem for problem in judged.verify())


@FOUR_RANKS
def test_a_forged_number_of_ranks_takes_no_memory(judged: Judged) -> None:
    loop(world_size=3 * 10**6)(judged.step)
    tracemalloc.start()
    try:
        judged.verify()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


@FOUR_RANKS
def test_nothing_unsound_gets_a_manifest(judged: Judged, capsys: pytest.CaptureFixture[str]) -> None:
    streams(numpy="x")(judged.step)
    assert call(["verify", str(judged.step), "--write-manifest"]) == 1
    assert "numpy: expected numpy's random state" in capsys.readouterr().err
    assert not (judged.step / "manifest.json").exists()


def test_lists_of_the_same_lists_are_read_once(tmp_path: Path) -> None:
    import torch

    from parallel_synthesis.checkpoint.reference_state import read_reference_state
    from parallel_synthesis.errors import CheckpointError

    path = tmp_path / STATE
    torch.save({"checkpoint_version": 2, "unknown": dag(60)}, path)
    state, _ = read_reference_state(path)
    assert state["unknown"][0] is state["unknown"][1]
    for version in (dag(60), 10**500, True):
        torch.save({"checkpoint_version": version}, path)
        with pytest.raises(CheckpointError, match="checkpoint_version is "):
            read_reference_state(path)


def test_the_generators_themselves_are_asked(tmp_path: Path) -> None:
    import random

    import numpy as np
    import torch

    from parallel_synthesis.checkpoint.reference_state import refuse_streams
    from parallel_synthesis.errors import CheckpointError

    before = torch.get_rng_state()
    numpy = np.random.RandomState(3).get_state(legacy=True)
    assert isinstance(numpy, tuple)
    sound = {
        "python": random.Random(3).getstate(),
        "numpy": (numpy[0], numpy[1].tolist(), *numpy[2:]),
        "torch_cpu": torch.Generator().get_state(),
        "torch_cuda": None,
    }
    refuse_streams(tmp_path, {"process_rng_state": sound})
    for name, value in (
        ("torch_cpu", tensor(5056)),
        ("python", (3, tuple(range(600, 1225)), None)),
        ("numpy", ("PCG64", [1], 0, 0, 0.0)),
    ):
        with pytest.raises(CheckpointError, match="of rank 1 is not one of a generator"):
            refuse_streams(
                tmp_path,
                {
                    "rank_state_by_rank": {
                        0: {"process_rng_state": sound},
                        1: {"process_rng_state": sound | {name: value}},
                    }
                },
            )
    assert torch.equal(torch.get_rng_state(), before)
