"""The guesses of heads along a text, their distance from the target, and how often it is right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tidemill.runner.spec.heads import Cache, DraftHead, EagleHead, ExitHead, MedusaHeads, Target

_DECAY = 0.8  # a later guess counts this much less than the one before it
_REGRESSION = 0.1  # the weight of the distance between states, beside that of distributions


@dataclass(slots=True)
class Batch:
    """Sequences side by side, padded at the end."""

    ids_BT: torch.Tensor
    states_BTH: torch.Tensor  # of the whole model
    # what the head starts from: the same, or the states of the first layers
    inputs_BTH: torch.Tensor
    learned_BT: torch.Tensor  # bool: states whose logits are learned


def guesses(
    head: DraftHead, target: Target, batch: Batch, num_guesses: int
) -> list[tuple[int, torch.Tensor]]:
    """(shift, states [B, T, H]): column t guesses the target's state at position t + shift."""
    if isinstance(head, ExitHead):
        return [(0, head(batch.inputs_BTH))]
    if isinstance(head, MedusaHeads):
        return list(enumerate(head(batch.inputs_BTH), 1))  # all heads, always
    assert isinstance(head, EagleHead)
    shifted, states, cache = [], batch.inputs_BTH, Cache()
    for shift in range(1, num_guesses + 1):
        ids_BT = F.pad(batch.ids_BT[:, shift:], (0, shift))
        states = head(target.embed(ids_BT), states, cache)
        shifted.append((shift, states))
    return shifted


def loss_of(head: DraftHead, target: Target, batch: Batch, num_guesses: int) -> torch.Tensor:
    """The cross-entropy of the target's distribution with that of each guess, and for EAGLE the
    distance of the states."""
    sequences, positions = batch.learned_BT.nonzero(as_tuple=True)
    true_MH = batch.states_BTH[sequences, positions]
    with torch.no_grad():
        probs_MD = target.logits(true_MH).softmax(-1)
    total, weights = torch.zeros(()), 0.0
    for i, (shift, states_BTH) in enumerate(guesses(head, target, batch, num_guesses)):
        is_there = positions >= shift
        guessed = states_BTH[sequences[is_there], positions[is_there] - shift]
        loss = F.cross_entropy(target.logits(guessed), probs_MD[is_there])
        if isinstance(head, EagleHead):
            true = true_MH[is_there]
            loss = loss + _REGRESSION * F.smooth_l1_loss(guessed, true) / true.abs().mean()
        total, weights = total + loss * _DECAY**i, weights + _DECAY**i
    return total / weights


@dataclass(slots=True)
class Drafted:
    """Greedy drafts after each place of a text, of which the token at the place after it is known."""

    is_right: torch.Tensor  # [places, drafts]: it is the token that follows
    probs: torch.Tensor  # what the head gives it


@torch.inference_mode()
def draft_along(head: DraftHead, target: Target, batch: Batch, num_drafts: int) -> Drafted:
    """The drafts along the one sequence of a batch."""
    shifted = guesses(head, target, batch, num_drafts)[:num_drafts]
    # each draft is an exit of its own, a position on from the one before
    if isinstance(head, ExitHead):
        shifted = [
            (shift, torch.roll(shifted[0][1], -shift, 1)) for shift in range(1, num_drafts + 1)
        ]
    (places,) = batch.learned_BT[0].nonzero(as_tuple=True)
    places = places[places + len(shifted) + 1 < batch.ids_BT.shape[1]]
    right, probs = [], []
    for shift, states_BTH in shifted:
        best = target.logits(states_BTH[0, places]).softmax(-1).max(-1)
        right.append(target.ids_D[best.indices] == batch.ids_BT[0, places + shift + 1])
        probs.append(best.values)
    return Drafted(torch.stack(right, 1), torch.stack(probs, 1))
