"""The directory that a conversion makes: written aside, shared by hosts, resumed after a kill, whole or not there.

    .NAME.converting/plan.json     what is being made; another plan is refused
                    /done/         a mark for each finished file
                    /model/        becomes NAME by one rename, when every mark is there
                    /host-0.lock   held while host 0 writes

Knows files and checksums, not what is in them.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bridge.manifest import FILE, INDEX_FILE, FileEntry, Manifest, ManifestEntry, index_json
from bridge.out_folder import PLAN, appear, aside_of, failed, held, make_folder
from bridge.shard_writer import ShardPlan, check_tensors, mark_path, read_mark, write_whole
from rl_jax.config import ConfigError
from rl_jax.models.fp8_rule import Format

_LONGEST = 80  # characters of a value that are shown


class ExportFolder:
    """One conversion on its way.

    Args:
        out: directory to make.
        plans: every file of it, those of other hosts included.
        identity: what decides the bytes beside the plans: checkpoint, format.
    """

    def __init__(self, out: Path, plans: Sequence[ShardPlan], identity: Mapping[str, object]):
        self.out = out.resolve()
        self.aside = aside_of(self.out)
        self.model = self.aside / "model"
        self.marks = self.aside / "done"
        self._plans = plans
        headers = hashlib.sha256(b"".join(plan.header for plan in plans)).hexdigest()
        self._plan_text = json.dumps({**identity, "headers": headers}, indent=1, sort_keys=True) + "\n"

    @contextlib.contextmanager
    def held(self, host: int) -> Iterator[None]:
        """Make the folder aside, or find the one of an earlier attempt or of another host; hold the files of `host`.

        Raises:
            ConfigError: the output exists or cannot be made, another process writes the files of this host, or another
                conversion to it has begun.
            OSError: the disk is full.
        """
        with held(self.out, host):
            try:
                self._begin()
            except OSError as error:
                self.discard(())
                raise failed(self.out, error) from error
            yield

    def _begin(self) -> None:
        plan = self.aside / PLAN
        if plan.is_file() and plan.read_text() != self._plan_text:
            differences = _differences(json.loads(plan.read_text()), json.loads(self._plan_text))
            fault = f"{self.aside}: another conversion to this directory was begun ({differences})"
            raise ConfigError([f"{fault}; repeat its command to finish it, or remove it"])
        write_whole(plan, self._plan_text.encode())
        make_folder(self.out, self.model)
        make_folder(self.out, self.marks)

    def unfinished(self, plans: Sequence[ShardPlan]) -> list[ShardPlan]:
        """Return the plans whose files are not done; files of an earlier attempt are read and their checksums compared."""
        left = []
        for plan in plans:
            sums = read_mark(self.model, self.marks, plan)
            try:
                if sums is not None:
                    check_tensors(self.model / plan.file, plan, sums)
                    continue
            except OSError:
                mark_path(self.marks, plan).unlink()
            left.append(plan)
        return left

    def missing(self) -> list[str]:
        """Return the files that no host has finished yet."""
        if self._is_made:
            return []
        return [p.file for p in self._plans if read_mark(self.model, self.marks, p) is None]

    def commit(self, fmt: Format, step: int, config: Mapping[str, object], copies: Sequence[Path]) -> None:
        """Add config, index, manifest and copies of files, and make the directory appear.

        Every host may call it once nothing is missing; the second one finds the work done, or being done.
        """
        try:
            self._commit(fmt, step, config, copies)
        except FileNotFoundError:
            if not self._is_made:
                raise

    @property
    def _is_made(self) -> bool:
        """Whether another host has made the directory."""
        return not self.model.exists() and self.out.is_dir()

    def _commit(self, fmt: Format, step: int, config: Mapping[str, object], copies: Sequence[Path]) -> None:
        files = {plan.file: [tensor.name for tensor in plan.tensors] for plan in self._plans}
        total_bytes = sum(tensor.nbytes for plan in self._plans for tensor in plan.tensors)
        contents = {path.name: path.read_bytes() for path in copies} | {
            "config.json": (json.dumps(config, indent=1) + "\n").encode(),
            INDEX_FILE: index_json(files, total_bytes).encode(),
        }
        manifest = Manifest(
            format=fmt,
            policy_step=step,
            config=config,
            files=(*map(_shard_entry, self._plans), *(_entry(*pair) for pair in sorted(contents.items()))),
            tensors=tuple(entry for plan in self._plans for entry in self._tensor_entries(plan)),
        )
        for name, content in {**contents, FILE: manifest.to_json().encode()}.items():
            write_whole(self.model / name, content)
        appear(self.model, self.out)

    def _tensor_entries(self, plan: ShardPlan) -> list[ManifestEntry]:
        sums = read_mark(self.model, self.marks, plan)
        if sums is None:
            raise FileNotFoundError(f"{plan.file}: was done, and is gone")
        return [
            ManifestEntry(name=t.name, dtype=t.dtype, shape=t.shape, file=plan.file, checksum=sums[t.name])
            for t in plan.tensors
        ]

    def discard(self, plans: Sequence[ShardPlan]) -> None:
        """Remove what this host wrote, and the folder if no tensors of other hosts are in it."""
        for plan in plans:
            mark_path(self.marks, plan).unlink(missing_ok=True)
            (self.model / plan.file).unlink(missing_ok=True)
            (self.model / f"{plan.file}.part").unlink(missing_ok=True)
        left = self.model.iterdir() if self.model.is_dir() else ()
        if not any(path.name.endswith((".safetensors", ".part")) for path in left):
            shutil.rmtree(self.aside, ignore_errors=True)


def _shard_entry(plan: ShardPlan) -> FileEntry:
    return FileEntry(file=plan.file, nbytes=plan.nbytes, checksum=hashlib.sha256(plan.header).hexdigest())


def _entry(name: str, content: bytes) -> FileEntry:
    return FileEntry(file=name, nbytes=len(content), checksum=hashlib.sha256(content).hexdigest())


def _differences(found: Mapping[str, object], wanted: Mapping[str, object]) -> str:
    """Say what was begun instead: another direction, or the same one with other values."""
    if found.keys() != wanted.keys():
        return ", ".join(f"{key}: {str(value)[:_LONGEST]}" for key, value in [*found.items()][:2])
    keys = [key for key in wanted if found[key] != wanted[key]]
    return ", ".join(f"{key}: {str(found[key])[:_LONGEST]} instead of {str(wanted[key])[:_LONGEST]}" for key in keys)
