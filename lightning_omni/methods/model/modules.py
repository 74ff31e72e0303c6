"""A torch module as plain data, from which another process can rebuild it without pickle.

The *description* has a module's class path, plain attributes and buffers, and the descriptions of its children. Classes
are imported by name, and only from ``torch.nn``, or if the server was started to allow them.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_omni.errors import UnsupportedError

# --- Classes by path, ``module:Class`` --------------------------------------------------------------------------------

T = TypeVar("T")


def admitting(
    base: type[T], home: tuple[str, str], what: str, option: str, allowed: Sequence[str]
) -> Callable[[str], type[T]]:
    """Return a function from class path to class, for subclasses of ``base`` that are torch's or in ``allowed``.

    ``home`` is torch's module of such classes and the prefix of its submodules; ``what`` (the kind of class) and
    ``option`` (of ``lightning-omni serve``) are for messages.
    """

    def resolve(path: str) -> type[T]:
        def check(module: str) -> None:
            if module != home[0] and not module.startswith(home[1]) and path not in allowed:
                raise UnsupportedError(
                    f"the {what} {path} is not from {home[0]}, and this server was not told to allow it; start it with:"
                    f" lightning-omni serve {option} {path}"
                )

        check(path.partition(":")[0])
        try:
            kind = import_class(path)
        except (ImportError, AttributeError, ValueError) as error:
            raise UnsupportedError(
                f"the server cannot import the {what} {path} ({error}); it must live in an installed module"
            ) from error
        except TypeError:
            kind = object
        else:
            check(kind.__module__)
        if not issubclass(kind, base) or kind is Optimizer:
            raise UnsupportedError(f"{path} is not a {home[0]}.{base.__name__}")
        return kind

    return resolve


def import_class(path: str) -> type:
    """Return the class at ``module:Class``, or ``module:Outer.Inner``.

    Every step must be a class, so that a path cannot lead into modules that ``module`` imports.
    """
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
        if not isinstance(found, type):
            raise TypeError(f"{part!r} is no class")
    kind: type = found
    return kind


def class_path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


ResolveModule = Callable[[str], type[nn.Module]]

_DTYPE, _FUNCTION = "$dtype", "$function"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_TORCH_FUNCTIONS = ("relu", "selu", "celu", "tanh", "sigmoid", "softmax", "log_softmax")
"""Functions of torch itself that modules hold as activations; those of ``torch.nn.functional`` are all allowed."""


def describe_module(module: nn.Module) -> dict[str, Any]:
    """Describe a module, so that `rebuild_module` can copy it in another process.

    Raises:
        UnsupportedError: it cannot be described; the message names the part.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return _describe(module, names, "")


def _describe(module: nn.Module, names: Mapping[int, str], where: str) -> dict[str, Any]:
    check_describable(module, where)
    bare = vars(nn.Module())
    return {
        "class": class_path(type(module)),
        "attributes": {
            key: _encode(value, module, where, key) for key, value in vars(module).items() if key not in bare
        },
        # Each weight has its first name, so that a weight that two modules share stays one weight.
        "parameters": {
            name: None if parameter is None else names[id(parameter)] for name, parameter in module._parameters.items()
        },
        "buffers": dict(module._buffers),
        "children": {
            name: None if child is None else _describe(child, names, f"{where}.{name}" if where else name)
            for name, child in module._modules.items()
        },
    }


def check_describable(module: nn.Module, where: str = "") -> None:
    """Raise `UnsupportedError` unless the server can import the module's class and run a copy of it.

    ``where`` is its name; hooks of the outermost module (``""``) run at the caller and are allowed.
    """
    kind, shown = type(module), where or "the module itself"
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise UnsupportedError(
            f"{shown}: the class {kind.__qualname__} is defined in the script itself, where the parameter server cannot"
            " import it; move it to a module of its own"
        )
    try:
        found = import_class(class_path(kind))
    except (ImportError, AttributeError, ValueError, TypeError):
        found = None
    if found is not kind:
        raise UnsupportedError(
            f"{shown}: the class {kind.__qualname__} cannot be imported from {kind.__module__} (it is made on the fly,"
            " as by torch.nn.utils.parametrizations); give the weights a plain module"
        )
    if not (where or kind.forward is not nn.Module.forward):
        raise UnsupportedError(
            f"a {kind.__qualname__} has no forward pass of its own, and only through that can a merged head be used"
        )
    if "forward" in vars(module):
        raise UnsupportedError(f"{shown} has a forward of its instance's own, which cannot be sent to the server")
    if getattr(module, "sparse", False) is True:
        raise UnsupportedError(
            f"{shown} makes sparse gradients, but the server's are dense; build it with sparse=False"
        )
    if getattr(module, "_compiled_call_impl", None) is not None:
        raise UnsupportedError(f"{shown} is compiled; the parameter server runs it as it is: do not compile it")
    if where and any(vars(module).get(hooks) for hooks in _HOOKS):
        raise UnsupportedError(f"{shown} has hooks, which cannot be sent to the parameter server; remove them")


def rebuild_module(
    description: Mapping[str, Any], parameters: Mapping[str, Parameter], resolve: ResolveModule
) -> nn.Module:
    """Make the described module in training mode; it uses the given parameters themselves.

    Raises:
        UnsupportedError: a class, function or dtype cannot be used.
    """
    kind = resolve(str(description["class"]))
    module = object.__new__(kind)
    # Only the base class is initialized: a subclass's constructor may need arguments that no description can hold.
    nn.Module.__init__(module)
    for key, value in description["attributes"].items():
        object.__setattr__(module, key, _decode(value))
    for name, own in description["parameters"].items():
        module.register_parameter(name, None if own is None else parameters[own])
    for name, buffer in description["buffers"].items():
        module.register_buffer(name, None if buffer is None else buffer.clone())
    for name, child in description["children"].items():
        module.add_module(name, None if child is None else rebuild_module(child, parameters, resolve))
    return module


def module_resolver(allowed: Sequence[str]) -> ResolveModule:
    return admitting(nn.Module, ("torch.nn", "torch.nn.modules."), "module class", "--allow-module", allowed)


def class_paths(description: Mapping[str, Any]) -> set[str]:
    children = [child for child in description["children"].values() if child is not None]
    return {description["class"]}.union(*(class_paths(child) for child in children))


def _encode(value: Any, module: nn.Module, where: str, key: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, _FUNCTIONS) and (path := _function_path(value)):
        return {_FUNCTION: path}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, module, where, key) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, (dict, set)) and not value:
        return type(value)() if isinstance(value, dict) else []
    if isinstance(value, dict) and all(isinstance(name, str) and not name.startswith("$") for name in value):
        return {name: _encode(item, module, where, key) for name, item in value.items()}
    raise UnsupportedError(
        f"{where or 'the module itself'} ({type(module).__qualname__}): its attribute {key!r} is a"
        f" {type(value).__qualname__}, and only plain values (numbers, strings, lists, dicts by text) can be sent to"
        " the parameter server"
    )


def _function_path(function: Any) -> str:
    name = function.__name__
    if getattr(torch.nn.functional, name, None) is function:
        return f"torch.nn.functional:{name}"
    return f"torch:{name}" if name in _TORCH_FUNCTIONS and getattr(torch, name) is function else ""


def _function_at(path: str) -> Any:
    module, _, name = path.partition(":")
    function: Any = None
    if module == "torch.nn.functional":
        function = getattr(torch.nn.functional, name, None)
    elif module == "torch" and name in _TORCH_FUNCTIONS:
        function = getattr(torch, name)
    if not isinstance(function, _FUNCTIONS):
        raise UnsupportedError(f"{path} is no function that a module may hold")
    return function


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if _DTYPE in value:
            dtype = getattr(torch, str(value[_DTYPE]), None)
            if not isinstance(dtype, torch.dtype):
                raise UnsupportedError(f"there is no dtype {value[_DTYPE]}")
            return dtype
        if _FUNCTION in value:
            return _function_at(str(value[_FUNCTION]))
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_decode(item) for item in value)
    return value


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree of tuples, lists and dicts; reject subclasses of these, sets and dataclasses."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _replace(tree, keep)
    return found


def with_tensors(tree: Any, tensors: Sequence[Any]) -> Any:
    """Return the tree with other tensors, in the order of `tensors_of`."""
    others = iter(tensors)
    return _replace(tree, lambda _: next(others))


def _replace(tree: Any, by: Callable[[Tensor], Any]) -> Any:
    # Only these exact types keep their type on the wire; a subclass would arrive as its base.
    if isinstance(tree, Tensor):
        return by(tree)
    if type(tree) in (tuple, list):
        return type(tree)([_replace(item, by) for item in tree])
    if type(tree) is dict:
        return {key: _replace(item, by) for key, item in tree.items()}
    if isinstance(tree, (tuple, list, dict, set)) or hasattr(tree, "__dataclass_fields__"):
        raise UnsupportedError(
            f"a {type(tree).__qualname__} cannot go into a merged head or come out of it; only tensors, plain values,"
            " and tuples, lists and dicts of them"
        )
    return tree
