"""Put an implementation in the place of a matched site: operand views, the call, the result as the user had it.

Dynamo's graph holds in-place calls that FX takes for pure, so dead code is never eliminated at large: only nodes that
fed the replaced site, that nobody uses any more and that are known to be pure are erased.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from fa4_inductor.capture.fx_view import is_mutation
from fa4_inductor.errors import DeclineReason, DeclineSite
from fa4_inductor.kernels.epilogue import build_epilogue, build_sum
from fa4_inductor.kernels.graph_aux import build_aux, build_tile_map
from fa4_inductor.kernels.graph_values import Memo
from fa4_inductor.kernels.sdpa import build_sdpa
from fa4_inductor.lowering.aux_layout import dense_slots
from fa4_inductor.lowering.config_table import is_long
from fa4_inductor.lowering.prepare import prepare
from fa4_inductor.lowering.support import Operands
from fa4_inductor.lowering.tile_map import size_hint, wants_tile_map, with_tile_map
from fa4_inductor.patterns.gradients import trains
from fa4_inductor.patterns.match import AttentionMatch, Operand, ViewStep, apply_view
from fa4_inductor.runtime.compile import forward_config
from fa4_inductor.runtime.ops import ATTENTION, ATTENTION_WITH_LSE
from fa4_inductor.spec import AttentionSpec

_MODULES_OF_PURE_FUNCTIONS = ("torch", "_operator", "math", "builtins")
_IN_PLACE_OPERATORS = {f for name, f in vars(operator).items() if name.startswith("i") and hasattr(operator, name[1:])}
_IN_PLACE_OPERATORS |= {operator.setitem, operator.delitem}
# Nodes that set interpreter state or draw random numbers stay even when nobody uses their value.
_STATEFUL_PARTS = (
    "autocast",
    "grad_enabled",
    "nesting",
    "hooks",
    "inference_mode",
    "rand",
    "bernoulli",
    "lazy_load",
    "functorch",
)

# Calls whose result does not depend on the memory layout of their input.
_LAYOUT_ENDS = {
    "contiguous", "size", "dim", "numel", "linear", "matmul", "mm", "bmm", "addmm", "einsum", "getattr",
}  # fmt: skip
# Calls whose result can have the layout of their input (views, pointwise ops and clones): their users decide.
_LAYOUT_PASSES = {
    "transpose", "permute", "unsqueeze", "reshape", "flatten", "to", "float", "half", "bfloat16", "type_as",
    "add", "sub", "mul", "truediv", "div", "neg", "sigmoid", "silu", "gelu", "relu", "dropout",
    "clone", "layer_norm", "rms_norm", "getitem", "select", "chunk", "split",
}  # fmt: skip


_COPYING_STEPS = ("to", "reshape", "repeat_interleave")
Built = tuple[fx.Node, fx.Node | None]
"""The result (B, Hq, Sq, Dv) and the log-sum-exp of its rows (B, Hq, Sq), None where it is not wanted."""


class Splicer:
    """Replaces sites of one graph. Raises `DeclineSite` before it has changed anything that is in use."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._views: dict[tuple[fx.Node, tuple[ViewStep, ...], bool], fx.Node] = {}
        self._masks: Memo = {}
        self._replaced: dict[fx.Node, fx.Node] = {}
        self._roots: list[fx.Node] = []

    def splice(self, *parts: tuple[AttentionMatch, str]) -> None:
        """Let each match be run by its implementation; several are the terms of one output.

        Raises `DeclineSite` when one cannot; the graph is then unchanged.
        """
        try:
            self.replace(*((match, functools.partial(self._build, match, name)) for match, name in parts))
        except Exception:
            # Nodes that this attempt shared with later sites are gone.
            self._views.clear()
            self._masks.clear()
            raise

    def _build(self, match: AttentionMatch, implementation: str, *operands: Any) -> Built:
        if implementation == "sdpa":
            return self._sdpa_node(match, *operands)
        return self._op_node(match, implementation, *operands)

    def replace(self, *parts: tuple[AttentionMatch, Callable[..., Built]]) -> None:
        """For each match `build(q, k, v, aux, sizes)` makes the node of the (B, Hq, Sq, Dv) result at the graph's
        insert point, and the one of the log-sum-exp where the match names it (a single one does)."""
        match = parts[0][0]
        output, roots = match.output, match.output.all_input_nodes
        replaced = [output] if match.lse is None else [n for n in self.graph.nodes if n in (output, match.lse)]
        before = replaced[0].prev
        try:
            grad_mode = torch.set_grad_enabled(trains(match))
            with grad_mode, self.graph.inserting_before(replaced[0]), fake_mode_of(output):
                results, (lse, *_) = zip(*(self._result(*part) for part in parts))
                result = self._view(build_sum(self.graph, results, output), match.output_view, output)
                result = self._restore(result, match)
                if match.lse is not None:
                    assert lse is not None
                    lse = self.call("call_function", operator.mul, (lse, match.lse_scale), match.lse)
        except Exception:
            while replaced[0].prev is not before:
                self.graph.erase_node(replaced[0].prev)
            raise
        self._put(output, result)
        if match.lse is not None and lse is not None:
            self._put(match.lse, lse)
        self._roots.extend(roots)

    def _result(self, match: AttentionMatch, build: Callable[..., Built]) -> Built:
        q, k, v = (self._operand(o, match.output) for o in (match.q, match.k, match.v))
        aux = [self._operand(o, match.output) for o in match.aux]
        (result, lse), epilogue = build(q, k, v, aux, self._sizes(match.sizes)), match.epilogue
        if epilogue is None:
            return result, lse
        aux, sizes = [self._operand(o, match.output) for o in epilogue.aux], self._sizes(epilogue.sizes)
        return build_epilogue(self.graph, epilogue.value, epilogue.specs, result, k, aux, sizes, match.output), lse

    def _sizes(self, sizes: tuple[fx.Node | int, ...]) -> list[fx.Node | int]:
        return [self._replaced.get(n, n) if isinstance(n, fx.Node) else n for n in sizes]

    def _put(self, old: fx.Node, new: fx.Node) -> None:
        new.meta = dict(old.meta)
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)
        self._replaced[old] = new

    def finish(self) -> None:
        """Erase what fed the replaced sites, nobody uses and is pure. Last, since a site may name nodes of another."""
        pending = list(dict.fromkeys(self._roots))
        while pending:
            node = pending.pop()
            if node._erased or node.users or not is_pure(node):
                continue
            pending.extend(node.all_input_nodes)
            self.graph.erase_node(node)

    def call(self, kind: str, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        """A node with its fake value, and the source location of `like`."""
        node = self.graph.create_node(kind, target, args)
        node.meta = {
            key: like.meta[key] for key in ("stack_trace", "nn_module_stack", "source_fn_stack") if key in like.meta
        }
        fake_args = fx.node.map_arg(args, value_of)
        node.meta["example_value"] = (
            getattr(fake_args[0], target)(*fake_args[1:]) if kind == "call_method" else target(*fake_args)
        )
        return node

    def _op_node(
        self,
        match: AttentionMatch,
        implementation: str,
        q: fx.Node,
        k: fx.Node,
        v: fx.Node,
        aux: list[fx.Node],
        sizes: list[Any],
    ) -> Built:
        spec = match.spec
        if implementation == "cute":
            prepared = prepare(spec)
            aux = build_aux(self.graph, prepared, q, k, aux, match.output, self._masks)
            spec = launched_spec(match.spec, value_of(q), value_of(k), value_of(v))
            if spec.tile_map is not None:
                tile_map = build_tile_map(self.graph, spec, q, k, aux, sizes, match.output, self._masks)
                aux = [*aux, tile_map]
        args = (q, k, v, aux, spec.text, sizes, implementation)
        if match.lse is None:
            return self.call("call_function", ATTENTION, args, match.output), None
        both = self.call("call_function", ATTENTION_WITH_LSE, args, match.output)
        out, lse = (self.call("call_function", operator.getitem, (both, i), match.output) for i in (0, 1))
        return out, lse

    def _sdpa_node(
        self, match: AttentionMatch, q: fx.Node, k: fx.Node, v: fx.Node, aux: list[fx.Node], sizes: list[Any]
    ) -> Built:
        """SDPA on exactly these operands: autocast would cast them and the mask, in which finfo.min becomes -inf."""
        build = functools.partial(build_sdpa, self.graph, match.spec, q, k, v, aux, sizes, match.output, self._masks)
        device = value_of(q).device.type
        if not self._may_autocast(device):
            return build(), None
        off = self.graph.call_function(torch.amp.autocast_mode._enter_autocast, (device, None, False, None))
        with torch.amp.autocast(device, enabled=False):
            result = build()
        self.graph.call_function(torch.amp.autocast_mode._exit_autocast, (off,))
        return result, None

    def _may_autocast(self, device: str) -> bool:
        inside = any(node.target is torch.amp.autocast_mode._enter_autocast for node in self.graph.nodes)
        return inside or torch.is_autocast_enabled(device)

    def _operand(self, operand: Operand, like: fx.Node) -> fx.Node:
        """The operand's view, shared with earlier sites when it moves no data (a copy could be outdated)."""
        keeps_grad = torch.is_grad_enabled()
        key = (operand.node, operand.view, keeps_grad)
        if key not in self._views:
            node = self._replaced.get(operand.node, operand.node)
            # A gradient that an operand could carry was stopped inside a site whose output has none.
            if value_of(node).requires_grad and not keeps_grad:
                node = self.call("call_method", "detach", (node,), like)
            node = self._view(node, operand.view, like)
            if any(step[0] in _COPYING_STEPS for step in operand.view):
                return node
            self._views[key] = node
        return self._views[key]

    def _view(self, node: fx.Node, steps: tuple[ViewStep, ...], like: fx.Node) -> fx.Node:
        for name, *args in steps:
            args = [list(a) if isinstance(a, tuple) else a for a in args]
            node = self.call("call_method", name, (node, *args), like)
        return node

    def _restore(self, result: fx.Node, match: AttentionMatch) -> fx.Node:
        """`result` with the dtype of the replaced node, and with its stride order where a user could tell."""
        output = match.output
        if value_of(result).dtype != match.out_dtype:
            result = self.call("call_method", "to", (result, match.out_dtype), output)
        have, want = value_of(result), value_of(output)
        if not isinstance(want, torch.Tensor):
            raise DeclineSite(DeclineReason.UNSUPPORTED_LAYOUT, "the replaced node holds no single tensor")
        if (
            have.dim() != want.dim()
            or have.dtype != want.dtype
            or have.device != want.device
            or _differ(have.shape, want.shape)
        ):
            got, expected = f"{have.dtype} {tuple(have.shape)}", f"{want.dtype} {tuple(want.shape)}"
            raise DeclineSite(DeclineReason.INTERNAL_ERROR, f"the replacement is {got}, the graph had {expected}")
        order = _stride_order(want)
        if order != _stride_order(have) and layout_matters(output):
            inverse = [order.index(i) for i in range(len(order))]
            for name, *args in (("permute", order), ("contiguous",), ("permute", inverse)):
                if args != [list(range(len(order)))]:
                    result = self.call("call_method", name, (result, *args), output)
        return result


def launched_spec(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionSpec:
    """The spec that a site with this one hands to the CuTe kernel. q, k, v: the (fake) operands."""
    spec = prepare(spec).spec
    if not wants_tile_map(spec, Operands.of(q, k, v)):
        return spec
    mapped = with_tile_map(spec, 0, 0)
    length = size_hint(q.shape[2])  # as far as it is known while compiling
    long_q = length is not None and is_long(length, bool(dense_slots(spec)))
    config, _ = forward_config(mapped, int(q.shape[3]), int(v.shape[3]), long_q=long_q, regular=True)
    return spec if config is None else with_tile_map(spec, config.tile_m, config.tile_n)


def value_of(node: fx.Node) -> Any:
    """The fake value Dynamo or this module recorded for a node. Raises `DeclineSite` when there is none."""
    if "example_value" not in node.meta:
        raise DeclineSite(DeclineReason.INTERNAL_ERROR, f"node {node.name} has no example value")
    return node.meta["example_value"]


def is_pure(node: fx.Node) -> bool:
    """Whether an unused node can go: a known functional torch call without in-place, out= or random behaviour."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = target_name(node)
    if (
        (name.endswith("_") and not name.endswith("__"))
        or is_mutation(node)
        or node.kwargs.get("inplace")
        or node.kwargs.get("out") is not None
    ):
        return False
    if any(part in name for part in _STATEFUL_PARTS) or (name == "dropout" and not _dropout_is_off(node)):
        return False
    if node.op == "call_method":
        return name not in ("backward", "set", "register_hook")
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.target._schema.is_mutable
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return name == "flex_attention"
    module = getattr(node.target, "__module__", None) or "torch"  # C functions of torch have none
    return module.split(".")[0] in _MODULES_OF_PURE_FUNCTIONS and node.target not in _IN_PLACE_OPERATORS


def layout_matters(node: fx.Node) -> bool:
    """Whether a user of `node` could tell other strides: `view`, calls we do not know, graph outputs."""
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop().users:
            name = target_name(user)
            if user.op not in ("call_function", "call_method"):
                return True
            if name in _LAYOUT_PASSES:
                if user not in seen:
                    seen.add(user)
                    pending.append(user)
            elif name not in _LAYOUT_ENDS or (name == "contiguous" and len(user.args) + len(user.kwargs) > 1):
                return True
    return False


def target_name(node: fx.Node) -> str:
    """`matmul` for torch.matmul, operator.matmul and "matmul" alike."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _dropout_is_off(node: fx.Node) -> bool:
    if node.target is not F.dropout:
        return False
    bound = inspect.signature(F.dropout).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments["training"] is False or bound.arguments["p"] == 0.0


def _stride_order(value: torch.Tensor) -> list[int]:
    """Dimensions from the slowest to the fastest; those of length 1 go where they keep the order sorted."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

    free = [statically_known_true(length == 1) for length in value.shape]
    order: list[int] = []
    for dim in range(value.dim()):
        place = len(order)
        while place and not free[dim] and not free[order[place - 1]]:
            if not guard_or_false(value.stride(order[place - 1]) < value.stride(dim)):
                break
            place -= 1
        order.insert(place, dim)
    return order


def _differ(have: Any, want: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return any(statically_known_true(a != b) for a, b in zip(have, want, strict=True))


@contextlib.contextmanager
def fake_mode_of(node: fx.Node) -> Iterator[None]:
    """Fake tensors of the graph under construction, without leaving guards on symbolic sizes behind."""
    value = node.meta.get("example_value")
    values = value if isinstance(value, tuple | list) else [value]
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)
    with contextlib.ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
            if mode.shape_env is not None:
                stack.enter_context(mode.shape_env.suppress_guards())
        yield


def operand_value(operand: Operand) -> torch.Tensor:
    """Fake value of an operand after its view: its shape, dtype and device."""
    with fake_mode_of(operand.node):
        steps = tuple(fx.node.map_arg(step, value_of) for step in operand.view)
        return apply_view(value_of(operand.node), steps)
