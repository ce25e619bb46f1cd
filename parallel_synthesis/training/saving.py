"""Saving: when, what, and in which order. The training thread takes the copy; the writer's thread does the rest."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from parallel_synthesis.checkpoint.background import BackgroundWriter
from parallel_synthesis.checkpoint.commit import link_checkpoint, link_final, prune, set_latest
from parallel_synthesis.checkpoint.components import HostState, capture, write_checkpoint
from parallel_synthesis.checkpoint.layout import (
    ADAPTER_MODEL,
    CACHE_MAPPER,
    RunPaths,
    committed_milestones,
    is_committed,
    milestone_name,
    newest_committed,
)
from parallel_synthesis.checkpoint.replace import replace_json
from parallel_synthesis.checkpoint.retention import keep
from parallel_synthesis.checkpoint.state import training_state
from parallel_synthesis.errors import DivergenceError
from parallel_synthesis.provenance.manifest import read as read_manifest
from parallel_synthesis.training.engine import Engine
from parallel_synthesis.training.events import Evaluation, Observer, StepRecord
from parallel_synthesis.training.ranks import fail_together
from parallel_synthesis.training.records import RunRecord
from parallel_synthesis.training.step import replica_difference


class Saver:
    """Takes and commits a run's checkpoints. `save` is collective; only the first process writes.

    parents: the lineage entries of every checkpoint. evaluations: the run's held-out losses, for the summary.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        paths: RunPaths,
        record: RunRecord,
        parents: Sequence[Mapping[str, Any]],
        observer: Observer,
        evaluations: list[Evaluation],
    ) -> None:
        self._engine = engine
        self._config = engine.config
        self._paths = paths
        self._record = record
        self._carried = record.carried()
        self._parents = parents
        self._observer = observer
        self._evaluations = evaluations  # the run's own list: it grows there
        self._writer = BackgroundWriter(enabled=engine.config.checkpoint.background)
        self._began = time.monotonic()
        self._last_saved: int | None = None
        # Memory of earlier copies, used again: fresh pages cost more than the copy. The newer may still be written.
        self._copies: deque[HostState | None] = deque([None, None], maxlen=2)
        self._announced: list[tuple[int, str | None, float]] = []

    @property
    def milestones(self) -> tuple[str, ...]:
        """Names of the milestones there are."""
        return tuple(committed_milestones(self._paths.out))

    def is_due(self, step: int) -> bool:
        """Every N steps, at milestones and at the planned end; skipped steps too."""
        every = self._config.checkpoint.every
        return (
            (every > 0 and step % every == 0)
            or step in self._config.checkpoint.milestones
            or step == self._engine.total_steps
        )

    def save(self, record: StepRecord | None = None) -> None:
        """Copies the state of now and hands it to the writer. record: the step just done, None before the first."""
        self._check_replicas()
        engine, progress, processes = self._engine, self._engine.progress, self._engine.processes
        streams = {rank: engine.streams.saved(rank) for rank in processes.mine}
        by_rank = {rank: state for part in processes.exchange(streams) for rank, state in part.items()}
        self._last_saved = progress.step
        if not processes.is_first:
            return
        state = capture(
            step=progress.step,
            mapper=engine.synthesizer.mapper.state_dict(),
            mapper_config={
                "hidden_dim": self._config.mapper.hidden_dim,
                "metadata_features": self._config.mapper.metadata_features,
            },
            adapter=engine.synthesizer.adapter_state(),
            adapter_config=engine.synthesizer.adapter_config(),
            training_state=training_state(
                global_step=progress.step,
                ranks=processes.ranks,
                optimizer_state=engine.optimizer.state_dict(),
                loop_state=progress.loop_state(
                    epoch_rng_state=engine.preparer.epoch_rng_state(progress.epoch_index)
                ),
                rank_states={
                    rank: progress.rank_state(rank, streams) for rank, streams in sorted(by_rank.items())
                },
                versions=self._record.environment["packages"],
            ),
            meta=self._meta(record),
            into=self._copies[0],
        )
        self._copies.append(state)
        summary = self._summary()
        self._writer.submit(lambda: self._write(state, summary))
        self._announce()

    def save_if_new(self) -> None:
        """A save at a step that has none yet."""
        if self._last_saved != self._engine.progress.step:
            self.save()

    def finish(self) -> None:
        """Waits for the last save and makes it the run's final checkpoint, manifest last: the run is complete."""
        self.wait()
        if self._engine.processes.is_first:
            link_final(self._paths.step(self._engine.progress.step), self._paths.out)
        self._engine.processes.exchange(None)

    def write_summary(self) -> None:
        if self._engine.processes.is_first:
            replace_json(self._paths.summary, self._summary(), "train_mixed_summary")

    def resumed_at(self, step: int) -> None:
        """The state of `step` is on the disk already."""
        self._last_saved = step

    def raise_if_failed(self) -> None:
        """Raises the failure of a save that has ended, in the process that writes."""
        self._writer.raise_if_failed()
        self._announce()

    def wait(self) -> None:
        """Until nothing is being written; then every process knows that the save is whole."""
        self._writer.wait()
        self._announce()
        self._engine.processes.exchange(None)

    def close(self) -> None:
        self._writer.close()

    def _write(self, state: HostState, summary: Mapping[str, Any]) -> None:
        """In the writer's thread: commit, latest, milestone, retention, summary; an order that loses nothing."""
        started = time.monotonic()
        checkpoint, paths = self._config.checkpoint, self._paths
        destination = paths.step(state.step)
        write_checkpoint(destination, state)
        set_latest(paths.step_checkpoints, state.step)
        milestone = None
        if state.step in checkpoint.milestones:
            milestone = keep_milestone(paths, self._config.recipe, state.step)
        steps = [there.step for there in newest_committed(paths.out)]
        named = {*checkpoint.milestones, min(steps)}  # the oldest anchors the lineage
        prune(paths.out, keep(steps, last=checkpoint.keep_last, every=checkpoint.keep_every, named=named))
        replace_json(paths.summary, summary, "train_mixed_summary")
        self._announced.append((state.step, milestone, time.monotonic() - started))

    def _announce(self) -> None:
        """Tells the observer, in the training thread, what the writer has committed."""
        while self._announced:
            step, milestone, seconds = self._announced.pop(0)
            self._observer.saved(step, self._paths.step(step), milestone, seconds)

    def _check_replicas(self) -> None:
        found = replica_difference(self._engine.parameters, self._engine.processes.exchange)
        if found is None:
            return
        name, process = found
        fail_together(
            self._engine.processes,
            DivergenceError(
                f"step {self._engine.progress.step}: tensor {name} of process {process} differs from that of "
                f"process 0; nothing was saved. Replicas must be bit-identical: look for a machine with other "
                f"hardware or libraries, then `ps resume {self._paths.out}`"
            ),
        )

    def _meta(self, record: StepRecord | None) -> dict[str, Any]:
        progress, totals = self._engine.progress, self._engine.progress.totals
        metrics: dict[str, Any] = {}
        if record is not None:
            metrics = {
                "task": record.task,
                "loss": record.loss,
                "perplexity": record.perplexity,
                "target_tokens": record.target_tokens,
            }
        if progress.step == self._engine.total_steps:
            metrics |= {
                "avg_loss": totals.loss,
                "perplexity": totals.perplexity,
                "target_tokens": totals.target_tokens,
                "optimizer_steps": totals.updates,
            }
        return {
            "schema_version": 1,
            "global_step": progress.step,
            "epoch": record.epoch
            if record is not None
            else min(progress.epoch_index, self._config.run.epochs - 1) + 1,
            "source_run_dir": str(self._paths.out),
            "metrics": metrics,
            "recipe": self._config.recipe,
            "recipe_sha256": self._record.recipe_sha256,
            "method": self._config.run.method,
            "base_model": self._config.backbone.model,
            "ranks": self._engine.processes.ranks,
            "total_steps": self._engine.total_steps,
            "data": {task: entry["sha256"] for task, entry in self._record.data.items()},
            "parents": [dict(parent) for parent in self._parents],
            **self._engine.synthesizer.embeddings_record(),
            "accepted_drift": list(self._record.accepted_drift),
            "versions": dict(self._record.environment["packages"]),
            "run": self._carried,
        }

    def _summary(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._began
        return self._record.summary(
            self._paths,
            self._engine.progress,
            evaluations=self._evaluations,
            train_seconds=seconds,
            total_seconds=seconds,
        )


def keep_milestone(paths: RunPaths, recipe: str, step: int) -> str:
    """Links the committed checkpoint of `step` as a milestone for ever; returns its name.

    One that is there already must hold the same components: DivergenceError names what differs, and it stays.
    """
    name = milestone_name(recipe, step)
    kept, source = paths.milestones / name, paths.step(step)
    if not is_committed(kept):
        link_checkpoint(source, kept)
        return name
    old, new = read_manifest(kept)["files"], read_manifest(source)["files"]
    for file in (CACHE_MAPPER, ADAPTER_MODEL):
        if old[file]["sha256"] != new[file]["sha256"]:
            raise DivergenceError(
                f"{kept}: {file} of this milestone is {old[file]['sha256'][:16]}, the repeated step {step} made "
                f"{new[file]['sha256'][:16]}; the milestone was left as it is. Compare the two, or move it away"
            )
    return name
