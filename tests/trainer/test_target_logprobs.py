"""Log-probs of targets, a chunk of scores at a time. Axes: M targets, E hidden, V vocabulary."""

import pytest
import torch
from torch import Tensor

from common.models.footprint import MAX_SCORES
from trainer_service.backbone.head import target_logprobs

M, E, V = 40, 16, 30


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, targets and temperatures."""
    random = torch.Generator().manual_seed(0)
    hidden_ME, head_VE = torch.randn(M, E, generator=random), torch.randn(V, E, generator=random)
    return hidden_ME, head_VE, torch.randint(0, V, (M,), generator=random), 0.5 + torch.rand(M, generator=random)


def plain(hidden_ME: Tensor, head_VE: Tensor, targets_M: Tensor, temperatures_M: Tensor) -> Tensor:
    scores_MV = hidden_ME @ head_VE.T / temperatures_M[:, None]
    return scores_MV.log_softmax(-1).gather(1, targets_M[:, None]).squeeze(1)


@pytest.mark.parametrize("max_scores", [1, V, 10 * V, 7 * V + 3, MAX_SCORES])
@pytest.mark.parametrize("learned", [None, [0, 3, 4, 39], []])
def test_the_size_of_a_chunk_changes_neither_log_probs_nor_gradients(
    max_scores: int, learned: list[int] | None
) -> None:
    # Given targets of which some may have a gradient
    hidden_ME, head_VE, targets_M, temperatures_M = drawn()
    expecting_ME, finding_ME = (hidden_ME.clone().requires_grad_() for _ in range(2))
    learned_M = None if learned is None else torch.tensor(learned, dtype=torch.int64)

    # When they are computed in chunks
    found_M = target_logprobs(finding_ME, head_VE, targets_M, temperatures_M, learned_M, max_scores)
    found_M.sum().backward()

    # Then each is what the whole matrix of scores gives, and has its gradient where it may
    expected_M = plain(expecting_ME, head_VE, targets_M, temperatures_M)
    chosen_M = torch.arange(M) if learned_M is None else learned_M
    expected_M[chosen_M].sum().backward()
    torch.testing.assert_close(found_M, expected_M)
    torch.testing.assert_close(finding_ME.grad, expecting_ME.grad)
