"""softmax(scale * Q K^T) V."""

PLAIN = True
MASKED = False
BOUND_LOG2 = None
HAS_SINK = False
EMPTY_ROW = "nan"
MAY_BE_EMPTY = False
