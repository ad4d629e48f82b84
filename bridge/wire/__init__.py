"""The wire format of live weight updates: folders that a sender writes and every replica checks before it commits.

Imported in both environments: NumPy and the standard library only, Python 3.11, nothing of rl_jax. The format is
described in docs/bridge.md; the files are `tensors` (dtype words, checksums), `delta` (changed blocks of one tensor),
`manifest` (what a folder says about itself), `sender` (trainer side) and `shadow` (replica side).
"""

from bridge.wire.manifest import Manifest, read_update
from bridge.wire.sender import Sender, Update
from bridge.wire.shadow import Shadow, Staged
from bridge.wire.tensors import Spec, WireError, sha256_of

__all__ = ["Manifest", "Sender", "Shadow", "Spec", "Staged", "Update", "WireError", "read_update", "sha256_of"]
