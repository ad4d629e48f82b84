"""What a call to an environment can end in besides a value (step 6 of docs/walk.md); each names its drop reason."""

from typing import ClassVar

from rl_jax.printable import printable
from rl_jax.types import DropReason


class EnvError(RuntimeError):
    """An environment gave no usable value. It costs the rollout that asked, never the run."""

    drop_reason: ClassVar[DropReason] = DropReason.REWARD_ERROR

    def __init__(self, text: str):
        super().__init__(printable(text))  # it goes to the terminal, the log and the ledger


class EnvFailed(EnvError):
    """The environment raised, its worker process died, or it returned something that is no task or reply."""


class EnvTimeout(EnvError):
    """The environment missed its deadline; its worker process was killed and replaced."""

    drop_reason = DropReason.REWARD_TIMEOUT


class EnvInvalid(EnvError):
    """The reward is not a finite number."""

    drop_reason = DropReason.REWARD_INVALID
