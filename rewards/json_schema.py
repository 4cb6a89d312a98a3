"""Reward: the completion is JSON that is valid under a schema."""

import functools
import json
from collections.abc import Iterable
from math import isinf
from typing import Any

from grpo_cli.files import open_file
from grpo_cli.rewards import reward
from grpo_cli.rewards._text import Completions, completion_texts, without_thoughts

# A recipe's schema, or the path of one; a column of schemas, one a row.
Schema = dict[str, Any] | str
Column = list[Schema | None]

KEPT = 1024  # schemas that are ready to be used again


@reward(timeout=5, preload=("jsonschema",), timeout_value=0.0)
def json_schema(
    completions: Completions, schema: Schema | Column | None = None, **_: Any
) -> list[float | None]:
    """Returns 1.0 where the completion is JSON and valid under the schema, else 0.0.

    What is read stands after the last `</think>`, if there is one (nothing, if a last `<think>`
    never closes): the content of the last closed fence that opens with ```json, or else the whole
    text. It has to be strict JSON (RFC 8259), with nothing before or after it: NaN and Infinity are
    none, nor are numbers beyond floating point; a repeated name and too deep nesting score 0.0 too.

    Recipe args:
        schema: a JSON schema, written in the recipe or as the path of a JSON file; null asks for
            JSON of any kind. Drafts 3 to 2020-12, as its `$schema` says, the last one unless it
            does. A column of this name gives each row a schema of its own, best as JSON text, for a
            table of objects fills the keys that a row lacks with null; what the recipe says wins.

    `$ref` reaches what the schema itself holds and the drafts' own schemas; nothing is fetched. A
    `format` is not checked. A row whose schema is missing (None or blank) gives None.
    """
    texts = completion_texts(completions)
    if not isinstance(schema, list):
        checks: Iterable[Any] = [_of_recipe(schema)] * len(texts)
    else:
        checks = map(_of_row, schema)
    return [
        None if validator is None else float(_is_valid(text, validator))
        for text, validator in zip(texts, checks, strict=True)
    ]


def _of_recipe(schema: Any) -> Any:
    if schema is None:
        return _validator("true")
    if isinstance(schema, str):
        try:
            with open_file(schema) as file:
                return _validator(file.read().decode(), where=schema)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"json_schema: schema is {schema!r}; it must be a schema or the path of a JSON "
                f"file: {error}."
            ) from error
    if not isinstance(schema, dict):
        raise ValueError(
            f"json_schema: schema is {schema!r}; it must be a schema or the path of a JSON file."
        )
    return _validator(json.dumps(schema))


def _of_row(schema: Any) -> Any:
    if not isinstance(schema, str):
        return None if schema is None else _validator(json.dumps(schema))
    return _validator(schema) if schema.strip() else None


@functools.lru_cache(KEPT)
def _validator(text: str, where: str | None = None) -> Any:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    must = f"json_schema: schema is {where or text!r:.200}; it must be"
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{must} JSON: {error}.") from error
    if not isinstance(schema, dict | bool):
        raise ValueError(f"{must} an object.")
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except (SchemaError, RecursionError) as error:
        reason = getattr(error, "message", str(error))
        raise ValueError(f"{must} a valid JSON schema: {reason:.200}.") from error
    _check_references(schema, kind, must)
    return kind(schema, registry=Registry())  # one that fetches nothing


def _check_references(schema: Any, kind: Any, must: str) -> None:
    """Looks up what the schema refers to: a validator does so only when a completion leads there.

    Raises:
        ValueError: there is no such place.
    """
    from jsonschema_specifications import REGISTRY
    from referencing import Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import specification_with

    draft = specification_with(kind.ID_OF(kind.META_SCHEMA))
    seen = set()

    def check(resource: Any, resolver: Any) -> None:
        for keyword in ("$ref", "$dynamicRef"):
            place = resource.contents.get(keyword) if isinstance(resource.contents, dict) else None
            if not isinstance(place, str):
                continue
            try:
                target = resolver.lookup(place)
            except Unresolvable as error:
                raise ValueError(
                    f"{must} complete: {keyword} {place!r} is not in it, and nothing is fetched."
                ) from error
            if id(target.contents) not in seen:
                seen.add(id(target.contents))
                check(draft.create_resource(target.contents), target.resolver)
        for part in resource.subresources():
            check(part, resolver.in_subresource(part))

    root = Resource.from_contents(schema, default_specification=draft)
    check(root, REGISTRY.resolver_with_root(root))


def _is_valid(text: str, validator: Any) -> bool:
    try:
        found = json.loads(
            _json_part(text),
            object_pairs_hook=_object,
            parse_constant=_no_number,
            parse_float=_finite,
        )
        return bool(validator.is_valid(found))
    except (ValueError, RecursionError, OverflowError):  # the last where an int is no float
        return False


def _json_part(text: str) -> str:
    text = without_thoughts(text)
    last: str | None = None
    fenced: list[str] | None = None
    for line in text.split("\n"):
        mark = line.strip()
        if fenced is None:
            fenced = [] if mark.lower() == "```json" else None
        elif mark == "```":
            last, fenced = "\n".join(fenced), None
        else:
            fenced.append(line)
    return text if last is None else last


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if isinf(number):
        raise ValueError("a number beyond floating point")
    return number
