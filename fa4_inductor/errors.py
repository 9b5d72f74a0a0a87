"""Errors and declines: the vocabulary in which every stage says why it did not do something."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Fa4Error(Exception):
    """Base of every error this package raises on purpose."""


class SettingsError(Fa4Error, ValueError):
    """A setting has a value it cannot have; the message names the variable or option."""


class ProgramError(Fa4Error, ValueError):
    """A score program is ill-formed (parser, verifier)."""


class KernelUnavailable(Fa4Error, RuntimeError):
    """A kernel cannot be built or loaded here; the message names the cause and the remedy."""


class StrictModeError(Fa4Error, RuntimeError):
    """`fa4.strict` is set and a site was declined or its kernel is unavailable."""


class DeclineReason(enum.Enum):
    """Why a site was left as the user wrote it. The value is the stable name used in counters and reports."""

    NOT_ATTENTION = "not_attention"  # softmax feeds a contraction, but the algebra is not softmax(QK^T)V
    PROBS_ESCAPE = "probs_escape"  # probabilities or scores have a second consumer
    NEEDS_GRAD = "needs_grad"  # gradients are wanted that this site or implementation cannot give
    DROPOUT = "dropout"  # dropout is active
    UNSUPPORTED_OP = "unsupported_op"  # an op between the contractions is not understood
    UNSUPPORTED_SHAPE = "unsupported_shape"  # rank, head grouping or broadcasting we cannot express
    UNSUPPORTED_LAYOUT = "unsupported_layout"  # q, k or v cannot be expressed as views of existing tensors
    UNSUPPORTED_DTYPE = "unsupported_dtype"
    UNSUPPORTED_HEAD_DIM = "unsupported_head_dim"
    UNSUPPORTED_DEVICE = "unsupported_device"
    UNSUPPORTED_PROGRAM = "unsupported_program"  # understood, but this implementation cannot run the program
    MUTATION = "mutation"  # a tensor is mutated between the point where it is read and the point of fusion
    EMPTY_ROWS = "empty_rows"  # the implementation cannot honour the contract of rows that keep no key
    KERNEL_UNAVAILABLE = "kernel_unavailable"  # CuTe-DSL missing, broken or failing to compile
    NOT_FASTER = "not_faster"  # understood, but the user's graph is at least as fast
    TENSOR_SUBCLASS = "tensor_subclass"
    INTERNAL_ERROR = "internal_error"  # a bug of ours, reported and harmless


@dataclass(frozen=True)
class Declined:
    """A refusal with its reason. `detail` is one sentence for a person, `location` is `file.py:line` of the user."""

    reason: DeclineReason
    detail: str = ""
    location: str = ""

    def __str__(self) -> str:
        text = self.reason.value
        if self.detail:
            text += f": {self.detail}"
        return f"{text} (at {self.location})" if self.location else text


class DeclineSite(Fa4Error):
    """Raised inside a stage to abandon the current site; the stage's entry point turns it into a `Declined` value."""

    def __init__(self, reason: DeclineReason, detail: str = "") -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail

    def at(self, location: str) -> Declined:
        """The same refusal as data, with the site's source location."""
        return Declined(self.reason, self.detail, location)
