"""The weight-transfer backend "rl_jax": updates come as folders (bridge/wire), are staged while serving, then committed.

    POST /init_weight_transfer_engine  {"init_info": {"shadow": null}}              once; a second call changes nothing
    stage through the worker extension (worker.py), or synchronously:
         /start_weight_update, /update_weights {"update_info": {"path": DIR, "phase": "stage"}}
    POST /pause?mode=keep
    POST /start_weight_update          (unless a stage above opened the update)
    POST /update_weights               {"update_info": {"path": DIR, "phase": "commit"}}
    POST /finish_weight_update         {"weight_version": "17"}
    POST /resume

Every check happens in the stage, on bytes beside the model. A refused stage leaves the replica serving what it served;
vLLM then closes the update, so neither update nor finish follows. A commit that raises leaves mixed weights: the
replica must be restarted, and refuses everything until then.
"""

import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from bridge.vllm_plugin.served import as_torch, read_back
from bridge.wire import Shadow, WireError

PHASES = ("stage", "commit")
State = Literal["idle", "staging", "staged", "refused", "broken"]


@dataclass
class FolderInit(WeightTransferInitInfo):
    """What the trainer says once.

    Attributes:
        shadow: directory on a local disk for the checkpoint bytes of the version served; None: in memory.
    """

    shadow: str | None = None


@dataclass
class FolderUpdate(WeightTransferUpdateInfo):
    """One phase of one update.

    Attributes:
        path: folder that bridge.wire.Sender wrote, on a file system that this worker sees.
        phase: "stage" or "commit".
    """

    path: str
    phase: str

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ValueError(f"update_info.phase is {self.phase!r}; expected one of {', '.join(PHASES)}")


class FolderTransferEngine(WeightTransferEngine[FolderInit, FolderUpdate]):
    """Applies update folders to the model of one worker."""

    init_info_cls = FolderInit
    update_info_cls = FolderUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._shadow: Shadow | None = None
        self._thread: threading.Thread | None = None
        self._state: State = "idle"
        self._report: dict[str, Any] = {}
        self._fault = ""

    def init_transfer_engine(self, init_info: FolderInit) -> None:
        """Map the checkpoint that the replica was started from; the first call only, so a trainer may come back."""
        if self._shadow is not None:
            return
        folder = Path(self.model_config.model)
        if not folder.is_dir():
            raise ValueError(f"model {folder} is not a local folder; start vLLM on the folder that the bridge wrote")
        store = None if init_info.shadow is None else Path(init_info.shadow) / f"rank-{self.parallel_config.rank}"
        self._shadow = Shadow(folder, store)

    def start_weight_update(self) -> None:
        """Nothing to prepare: the model is touched in the commit only."""

    def finish_weight_update(self) -> None:
        """Nothing to finish: the commit ends with whole weights."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Run one phase to its end.

        Raises:
            ValueError: the phase is refused; before a commit the model is as it was.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FolderUpdate) -> None:
        """Stage or commit one folder."""
        if update_info.phase == "stage":
            self.begin_stage(update_info.path)
        self._join()
        if self._state != "staged":
            raise ValueError(self._fault or f"{update_info.path}: nothing is staged; stage it first")
        if update_info.phase == "commit":
            self._commit(update_info.path)

    def begin_stage(self, path: str) -> dict[str, Any]:
        """Stage in a thread, so that serving goes on; return the status at once.

        Raises:
            ValueError: the engine has no shadow yet, is broken, or is staging another update.
        """
        if self._shadow is None:
            raise ValueError("no shadow of the checkpoint; POST /init_weight_transfer_engine first")
        if self._state == "broken":
            raise ValueError(self._fault)
        if self._thread is not None and self._thread.is_alive():
            raise ValueError(f"{path}: another update is being staged; wait for it: {self._report}")
        self._state, self._fault, self._report = "staging", "", {"path": path}
        self._thread = threading.Thread(target=self._stage, args=(self._shadow, path), name="rl_jax-stage")
        self._thread.start()
        return self.status()

    def status(self) -> dict[str, Any]:
        """Return state, fault, report of the last stage, and the version and digest that are served."""
        shadow = self._shadow
        return {
            "state": self._state,
            "fault": self._fault,
            **self._report,
            "served_version": None if shadow is None else shadow.version,
            "served_digest": None if shadow is None else shadow.digest,
        }

    def read_back(self) -> dict[str, Any]:
        """Compare the weights that the model computes with against the version that it should serve."""
        if self._shadow is None:
            raise ValueError("no shadow of the checkpoint; POST /init_weight_transfer_engine first")
        return asdict(read_back(self.model, self._shadow))

    def shutdown(self) -> None:
        """Wait for a stage that is under way; the shadow stays, so the next trainer may send deltas."""
        self._join()

    def _stage(self, shadow: Shadow, path: str) -> None:
        try:
            staged = shadow.stage(path)
        except (WireError, OSError, MemoryError) as error:
            self._fault, self._state = str(error) or repr(error), "refused"
        else:
            self._report = {"path": path, **asdict(staged)}
            self._state = "staged"

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _commit(self, path: str) -> None:
        """Hand every layer with a change to vLLM's own loaders."""
        assert self._shadow is not None, "a staged update has a shadow"
        layers = self._shadow.commit(path)
        self._state = "broken"
        self._fault = f"{path}: the commit did not end, so the weights are mixed; restart the replica"
        initialize_layerwise_reload(self.model)
        self.model.load_weights((spec.name, as_torch(spec, bits)) for spec, bits in layers)
        finalize_layerwise_reload(self.model, self.model_config)
        self._state, self._fault = "idle", ""
