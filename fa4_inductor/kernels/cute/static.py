"""Trace-time objects that may be used inside dynamic control flow."""


class TraceObject:
    """Base of helper objects whose methods are called inside a dynamic `if`, `for` or `while`.

    The DSL carries every object with a method call through such a region. These objects hold only values defined before
    the region and register tensors (which live in memory), so they carry nothing and stay themselves.
    """

    def __extract_mlir_values__(self) -> list:
        return []

    def __get_mlir_types__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list) -> "TraceObject":
        return self
