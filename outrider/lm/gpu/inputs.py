"""The inputs of captured forwards, at fixed addresses, and the block table that all graphs share.

A step copies its inputs with one copy from pinned memory. The pages of a running sequence stay on
the device: a step sends only the pages that are new.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from outrider.lm.layout import (
    KernelArguments,
    SequenceSlice,
    StaticLayout,
    ancestors_by_token,
    logits_indices,
    slot_mapping,
)
from outrider.lm.pages import KVSequence


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The tokens in a page, the maximum pages of a sequence, and the page for padding."""

    page_size: int
    pages_each: int
    spare_page: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A captured forward's numbers of sequences and tokens, and the longest sequence's tokens."""

    batch: int
    rows: int
    longest: int


class BlockTable:
    """A table with the pages of the last `most` sequences that ran, and a row for padding.

    A sequence keeps its row until another sequence needs the room; then the sequence that ran
    longest ago loses its row.
    """

    def __init__(self, most: int, shape: CacheShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.padding_row = most
        size = (most + 1, shape.pages_each)
        self.pages_RP = torch.full(size, shape.spare_page, dtype=torch.int32, device=device)
        self._unused = list(range(most))
        # The sequences are in the order in which they ran. The references keep Python from reusing
        # their identities.
        self._rows: dict[KVSequence, int] = {}
        self._pinned = device.type == "cuda"
        self._copied = torch.Event(device) if self._pinned else None

    def host_and_device(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Create two int32 arrays of zeros: on the host (pinned for a GPU), and on the device."""
        host = torch.zeros(size, dtype=torch.int32, pin_memory=self._pinned)
        return host, torch.zeros_like(host, device=self.device)

    def wait(self) -> None:
        """Wait until the device has read the host arrays of the last step."""
        if self._copied is not None:
            self._copied.synchronize()

    def mark_copied(self) -> None:
        """Note that the copies of this step's host arrays have been queued."""
        if self._copied is not None:
            self._copied.record()

    def rows(self, slices: Sequence[SequenceSlice], ahead: int = 0) -> list[int]:
        """Return each slice's row, after sending the pages that the rows lack.

        The pages of `ahead` tokens after each slice are sent too. A slice without a `kv` gets the
        row of a new sequence. The table has rows for at most `most` slices.
        """
        sequences = [part.kv or KVSequence(part.pages) for part in slices]
        rows = self._rows_of(sequences)
        width = self.shape.pages_each
        at: list[int] = []
        pages: list[int] = []
        for part, sequence, row in zip(slices, sequences, rows, strict=True):
            end = -(-(part.end + ahead) // self.shape.page_size)
            begin = sequence.sent_page_count
            if begin < end:
                at += range(row * width + begin, row * width + end)
                pages += part.pages[begin:end]
                sequence.sent_page_count = end
        if at:
            self._send(at, pages)
        return rows

    def _rows_of(self, sequences: Sequence[KVSequence]) -> list[int]:
        known = self._rows
        for sequence in sequences:
            row = known.pop(sequence, None)
            if row is not None:
                known[sequence] = row
        # The sequences of this batch now come last in the order, so none of them loses its row.
        for sequence in sequences:
            if sequence not in known:
                known[sequence] = self._take_row()
                sequence.sent_page_count = 0
        return [known[sequence] for sequence in sequences]

    def _take_row(self) -> int:
        if self._unused:
            return self._unused.pop()
        return self._rows.pop(next(iter(self._rows)))

    def _send(self, at: list[int], pages: list[int]) -> None:
        """Write page numbers at places of the flattened table: one copy and one kernel."""
        words = np.concatenate([np.array(at).view(np.int32), np.array(pages, np.int32)])
        host = torch.from_numpy(words)
        if self._pinned:
            # Torch reuses this memory only after the copy.
            host = host.pin_memory()
        sent = host.to(self.device, non_blocking=True)
        places = sent[: 2 * len(at)].view(torch.int64)
        self.pages_RP.view(-1).index_copy_(0, places, sent[2 * len(at) :])


class Inputs:
    """Inputs of one bucket's forwards at fixed addresses.

    Padding tokens write to the spare page. As long as the batch has room for more sequences, a
    padding token is a sequence of one token; further padding rows hold arbitrary values. Nothing
    reads padding.
    """

    def __init__(self, bucket: Bucket, table: BlockTable) -> None:
        self.bucket = bucket
        self._table = table
        rows = bucket.rows
        by_token = ("token_ids", "slot_mapping", "logits_indices")
        # The 64-bit arrays come first, because their addresses must be multiples of 8. The arrays
        # whose numbers grow by 1 with each token lie together, so that one kernel adds to them.
        sizes = {
            "ancestors": 2 * rows,
            **dict.fromkeys(by_token, rows),
            **dict.fromkeys(("positions", "slots"), rows),
            **dict.fromkeys(("seq_lens", "tree_starts", "table_rows"), bucket.batch),
            "cu_seqlens_q": bucket.batch + 1,
        }
        self._host, self._device = table.host_and_device(sum(sizes.values()))
        self._numbers = dict(
            zip(sizes, [t.numpy() for t in torch.split(self._host, [*sizes.values()])], strict=True)
        )
        self._words = self._numbers["ancestors"].view(np.uint64)
        self._arrays = dict(zip(sizes, torch.split(self._device, [*sizes.values()]), strict=True))
        self.token_ids = self._arrays["token_ids"]
        self.positions = self._arrays["positions"]
        self.ancestors = self._arrays["ancestors"].view(torch.int64)
        places = {name: array.storage_offset() for name, array in self._arrays.items()}
        self._counting = self._device[places["positions"] : places["table_rows"]]
        self._occupied = self._device[places["slots"] : places["tree_starts"]]

    def layout(self) -> StaticLayout:
        """Return the layout for the layers.

        Call it within the capture, because it converts the slot mapping to int64 and gathers the
        batch's rows of the block table.
        """
        arrays = self._arrays
        kernel = KernelArguments(
            arrays["cu_seqlens_q"], arrays["seq_lens"],
            self._table.pages_RP.index_select(0, arrays["table_rows"]),
            arrays["slots"], self.positions, arrays["tree_starts"],
            # Trees have at least two tokens, so graphs for single tokens need no code for them.
            self.ancestors, has_trees=self.bucket.longest > 1,
        )  # fmt: skip
        return StaticLayout(arrays["slot_mapping"].long(), kernel)

    def advance(self) -> None:
        """Advance each sequence by one token, without the host.

        Each sequence of the bucket must have one token. The caller writes `token_ids`. The pages
        must have been sent, see `write`. Padding stays in the spare page.
        """
        self._counting += 1
        self._find_slots(self._arrays["table_rows"])

    def follow_tree(self, width: int) -> None:
        """Advance each sequence by `width` rows, which are one level deeper in its tree.

        The caller writes `token_ids` and `ancestors`. Everything else is as in `advance`.
        """
        self.positions += 1
        self._occupied += width
        self._find_slots(self._arrays["table_rows"].repeat_interleave(width))

    def _find_slots(self, table_rows_T: torch.Tensor) -> None:
        """Find the tokens' slots in the cache from their sequences' rows in the block table."""
        slots_T, shape = self._arrays["slots"], self._table.shape
        places_T = torch.add(slots_T // shape.page_size, table_rows_T, alpha=shape.pages_each)
        pages_T = self._table.pages_RP.view(-1).index_select(0, places_T)
        in_page_T = torch.remainder(slots_T, shape.page_size)
        slot_mapping_T = self._arrays["slot_mapping"]
        torch.add(in_page_T, pages_T, alpha=shape.page_size, out=slot_mapping_T)

    def write(self, slices: Sequence[SequenceSlice], ahead: int = 0) -> torch.Tensor | None:
        """Write a batch and its padding, and send the pages of `ahead` more tokens per sequence.

        Returns the rows of `logits_indices(slices)` on the device, int32 [R]; None if they are the
        first R rows.
        """
        batch, rows = self.bucket.batch, self.bucket.rows
        self._table.wait()
        shape = self._table.shape
        padding = rows - sum(len(part.token_ids) for part in slices)
        spare_slot = shape.spare_page * shape.page_size
        self._by_token("token_ids", (token for part in slices for token in part.token_ids))
        self._by_token("positions", (at for part in slices for at in part.positions))
        self._by_token("slots", (slot for part in slices for slot in part.slots))
        self._by_token("slot_mapping", slot_mapping(slices, shape.page_size), spare_slot)
        wanted = logits_indices(slices)
        is_prefix = wanted == list(range(len(wanted)))
        if not is_prefix:
            self._by_token("logits_indices", wanted)
        unused = batch - len(slices)
        singles = min(padding, unused)
        lengths = [len(part.token_ids) for part in slices]
        lengths += [1] * singles + [0] * (unused - singles)
        numbers = self._numbers
        numbers["cu_seqlens_q"][:] = [0, *accumulate(lengths)]
        numbers["seq_lens"][:] = [part.end for part in slices] + [1] * unused
        numbers["tree_starts"][:] = [part.tree_start for part in slices] + [1] * unused
        padding_rows = [self._table.padding_row] * unused
        numbers["table_rows"][:] = self._table.rows(slices, ahead) + padding_rows
        if any(part.parents for part in slices):
            words = ancestors_by_token(slices)
            self._words[: len(words)] = words
        self._device.copy_(self._host, non_blocking=True)
        self._table.mark_copied()
        return None if is_prefix else self._arrays["logits_indices"][: len(wanted)]

    def _by_token(self, name: str, numbers: Iterable[int], padding: int = 0) -> None:
        """Write a number for each token, and the padding after them."""
        written = [*numbers]
        self._numbers[name][:] = written + [padding] * (self.bucket.rows - len(written))
