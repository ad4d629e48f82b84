"""Where the rows of each sequence lie."""

from dataclasses import dataclass

import torch

from kernels.indices import check_index_dtype, is_read


@dataclass(frozen=True)
class Tables:
    """Row s of sequence b lies in page tables_BP[b, s // M] at place s % M, for s below lengths_B[b].

    Example, pages of 4 places: tables_BP = [[7, 2], [5, 0]], lengths_B = [6, 3]: the rows of the first sequence are page 7
    and two places of page 2, those of the second three places of page 5.
    """

    tables_BP: torch.Tensor
    """int32 or int64, as wide as the longest sequence needs; what lies behind a length is not looked at."""
    lengths_B: torch.Tensor
    """int32 or int64."""
    is_checked: bool | None = None
    """Read both before a launch; None: only when they are on the host (kernels/indices.py)."""

    def check(self, cache: torch.Tensor, batch: int) -> None:
        """Raise ValueError unless both are of the batch and, where they are read, point into the cache [P, M, ...]."""
        check_index_dtype("tables_BP", self.tables_BP, rank=2)
        check_index_dtype("lengths_B", self.lengths_B)
        for name, tensor in (("tables_BP", self.tables_BP), ("lengths_B", self.lengths_B)):
            if len(tensor) != batch or tensor.device != cache.device:
                raise ValueError(
                    f"{name}: {len(tensor)} rows on {tensor.device}; must be {batch} on {cache.device} like the query"
                )
        if is_read(self.tables_BP, self.is_checked) and is_read(self.lengths_B, self.is_checked):
            self.check_contents(*cache.shape[:2])

    def check_contents(self, num_pages: int, page_size: int) -> None:
        """Raise ValueError for a length that the table has no room for, or a page that is none."""
        num_entries = self.tables_BP.shape[1]
        room = num_entries * page_size
        outside_B = (self.lengths_B < 0) | (self.lengths_B > room)
        if outside_B.any():
            b = int(outside_B.nonzero()[0])
            raise ValueError(
                f"lengths_B: sequence {b} has {int(self.lengths_B[b])} rows; its table has room for 0 to {room}"
            )
        first_P = torch.arange(num_entries, device=self.lengths_B.device) * page_size
        outside_BP = (first_P < self.lengths_B[:, None]) & ((self.tables_BP < 0) | (self.tables_BP >= num_pages))
        if outside_BP.any():
            b, p = outside_BP.nonzero()[0].tolist()
            page = int(self.tables_BP[b, p])
            raise ValueError(f"tables_BP: entry [{b}, {p}] is {page}; must be a page from 0 to {num_pages - 1}")
