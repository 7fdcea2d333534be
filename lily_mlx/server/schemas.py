"""JSON schemas of tools' parameters: which values they admit, and one parameter's schema without the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

KINDS = ("null", "boolean", "integer", "number", "object", "array", "string")  # the narrower ones first
_DEEPEST = 64  # levels that are followed; what is below counts as anything


@dataclass(frozen=True)
class Admitted:
    """The values that a schema admits, as far as its types and its lists of values say.

    Attributes:
        kinds: JSON types, of KINDS.
        texts: the strings, where they are listed; None for any string.
    """

    kinds: frozenset[str]
    texts: tuple[str, ...] | None = None

    @property
    def any_text(self) -> bool:
        """Whether the strings are not listed."""
        return "string" in self.kinds and self.texts is None

    def and_(self, other: Admitted) -> Admitted:
        """What both admit."""
        if self.texts is None or other.texts is None:
            texts = other.texts if self.texts is None else self.texts
        else:
            common = set(other.texts)
            texts = tuple(text for text in self.texts if text in common)
        return _made(self.kinds & other.kinds, texts)


ANYTHING = Admitted(frozenset(KINDS))
NOTHING = Admitted(frozenset(), ())


def _union(options: Sequence[Admitted]) -> Admitted:
    """What one of them admits."""
    texts = None
    if not any(option.any_text for option in options):
        texts = tuple(dict.fromkeys(text for option in options for text in option.texts or ()))
    return _made(NOTHING.kinds.union(*(option.kinds for option in options)), texts)


def _made(kinds: frozenset[str], texts: tuple[str, ...] | None) -> Admitted:
    """Strings are among the kinds if and only if there is one."""
    if "string" not in kinds or texts == ():
        return Admitted(kinds - {"string"}, ())
    return Admitted(kinds, texts)


def admitted(schema: Any, root: Any) -> Admitted:
    """What a schema admits by `type`, `enum`, `const`, `anyOf`, `oneOf`, `allOf` and local references.

    Args:
        schema: of one value; what is no schema admits anything.
        root: what local references begin at.
    """
    return _admitted(schema, _with_own(schema, root), {}, 0)


def properties_of(parameters: Any) -> tuple[dict[str, Any], list[str]]:
    """The schemas of a function's parameters, and the names of those that are required.

    Args:
        parameters: schema of all; may be a reference to a part of itself.
    """
    for _ in range(_DEEPEST):
        if not isinstance(parameters, dict) or not isinstance(parameters.get("$ref"), str):
            break
        target = resolve(parameters["$ref"], parameters)[1]
        definitions = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
        parameters = {**definitions, **target} if isinstance(target, dict) else {}
    parameters = parameters if isinstance(parameters, dict) else {}
    properties, required = parameters.get("properties"), parameters.get("required")
    return properties if isinstance(properties, dict) else {}, required if isinstance(required, list) else []


def _with_own(schema: Any, root: Any) -> Any:
    """The root, with definitions of the schema that it lacks: some writers put them beside their use."""
    if not isinstance(root, dict) or not isinstance(schema, dict):
        return root
    result = dict(root)
    for name in ("$defs", "definitions"):
        if isinstance(schema.get(name), dict):
            outer = root.get(name)
            result[name] = {**schema[name], **(outer if isinstance(outer, dict) else {})}
    return result


def _admitted(schema: Any, root: Any, known: dict[str, Admitted], level: int) -> Admitted:
    if schema is False:
        return NOTHING
    if not isinstance(schema, dict) or level > _DEEPEST:
        return ANYTHING
    result = ANYTHING
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = NOTHING  # for a reference to itself on the way
            found, target = resolve(reference, root)
            known[reference] = _admitted(target, root, known, level + 1) if found else NOTHING
        result = result.and_(known[reference])
    declared = schema.get("type")
    if declared is not None:
        names = [name for name in (declared if isinstance(declared, list) else [declared]) if name in KINDS]
        if names:  # other names, such as "any", say nothing
            result = result.and_(_made(frozenset([*names, *(["integer"] if "number" in names else [])]), None))
    if "const" in schema:
        result = result.and_(_listed([schema["const"]]))
    if isinstance(schema.get("enum"), list):
        result = result.and_(_listed(schema["enum"]))
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            options = [_admitted(option, root, known, level + 1) for option in schema[name]]
            result = result.and_(_union(options))
    if isinstance(schema.get("allOf"), list):
        for part in schema["allOf"]:
            result = result.and_(_admitted(part, root, known, level + 1))
    return result


def _listed(values: Iterable[Any]) -> Admitted:
    values = list(values)
    texts = dict.fromkeys(value for value in values if isinstance(value, str))
    return _made(frozenset(map(_kind, values)), tuple(texts))


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    for kind, of in (("boolean", bool), ("integer", int), ("string", str), ("object", dict), ("array", list)):
        if isinstance(value, of):
            return kind
    return "integer" if float(value).is_integer() else "number"


def resolve(reference: str, root: Any) -> tuple[bool, Any]:
    """What a local reference such as `#/$defs/a` means: whether there is such a place, and what is there."""
    if not reference.startswith("#"):
        return False, None
    place = root
    path = unquote(reference[1:])
    if path and not path.startswith("/"):
        return False, None
    for part in path.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict) and part in place:
            place = place[part]
        elif isinstance(place, list) and part.isdecimal() and int(part) < len(place):
            place = place[int(part)]
        else:
            return False, None
    return True, place


def by_itself(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """A schema with all that its local references lead to, so that it means the same without its root.

    Args:
        schema: a part of the root.
        root: what local references begin at.
    """
    root = _with_own(schema, root)
    places: dict[str, str] = {}  # references by their new names
    targets: list[Any] = []

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(item) for item in value]
        if not isinstance(value, dict):
            return value
        result = {key: moved(item) for key, item in value.items()}
        reference = value.get("$ref")
        if isinstance(reference, str):
            found, target = resolve(reference, root)
            if found:
                if reference not in places:
                    places[reference] = f"#/$defs/{len(places)}"
                    targets.append(target)
                result["$ref"] = places[reference]
        return result

    result = moved({key: item for key, item in schema.items() if key not in ("$defs", "definitions")})
    definitions: dict[str, Any] = {}
    while len(definitions) < len(targets):
        definitions[str(len(definitions))] = moved(targets[len(definitions)])
    return {**result, "$defs": definitions} if definitions else result
