"""DSpark's memory of earlier tokens begins at the same token as in DSpark's training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.heads.kinds.dspark import DSpark
from outrider.heads.loading import load
from outrider.heads.model import Extension, TargetWeights
from outrider.heads.reading import read
from tests.heads import head_files
from tests.heads.head_files import HIDDEN, RANK, TARGET, VOCAB, write
from tests.heads.head_scores import scores_of

TEXT = [(5 * i * i + i) % VOCAB for i in range(12)]


@pytest.mark.parametrize("anchor_predicts", [False, True])
@torch.inference_mode()
def test_the_memory_begins_with_the_anchors_row(anchor_predicts: bool, tmp_path: Path) -> None:
    config, tensors = head_files.dspark_speculators()
    config |= {"markov_head_type": "rnn", "sample_from_anchor": anchor_predicts}
    tensors |= {
        "markov_head.joint_proj.weight": torch.randn(3 * RANK, 2 * RANK + HIDDEN),
        "markov_head.joint_proj.bias": torch.randn(3 * RANK),
    }
    head = read(write(tmp_path, (config, tensors)), TARGET)
    weights = TargetWeights(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN))
    model = load(head, weights, page_count=8)
    assert isinstance(model, DSpark)
    features, length, steps = torch.randn(len(TEXT), 3 * HIDDEN), 8, 3
    found = scores_of(model, TEXT, features, [length], steps)[0][0]

    sequence = model.open(TEXT[:length])
    model.extend([Extension(sequence, [], features[: length - 1], 0)])
    model._reserve([(sequence, length + 8)])
    rows = model.block([sequence])[0]
    # The place of the token before each row. The token before the anchor's row is the anchor. If
    # the anchor's row guesses nothing, the anchor also comes before the next row.
    before = [length - 1 + max(0, row - (not anchor_predicts)) for row in range(steps + 1)]
    memory, expected = torch.zeros(RANK), []
    for row, at in enumerate(before):
        token = tensors["markov_head.markov_w1.weight"][TEXT[at]]
        joint = tensors["markov_head.joint_proj.weight"] @ torch.cat((memory, token, rows[row]))
        gate, candidate, out = (joint + tensors["markov_head.joint_proj.bias"]).chunk(3)
        memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * candidate.tanh()
        correction = tensors["markov_head.markov_w2.weight"] @ out.tanh()
        expected.append(weights.lm_head @ rows[row] + correction)
    wanted = torch.stack(expected)[:steps] if anchor_predicts else torch.stack(expected)[1:]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
