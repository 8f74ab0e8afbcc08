"""A PDCluster manifest -> typed spec, with every error at once.

Parsing goes on after an error. ``ParseResult.cluster`` is therefore only meant to be used for work
when ``errors`` is empty.

This is our own code because neither of the two libraries at hand does all of it. Both were
tried, msgspec 0.22 and pydantic 2.14:

* msgspec stops at the first error. Admission reports all errors of a manifest at once.
* pydantic reports all errors with their paths and values, but returns no object then. Rules
  that compare fields could not run, and their findings would come only after the user has
  corrected the first ones. Here a field that cannot be read takes its default, and the rules
  check the rest.
* Neither has a remedy: the nearest known name, or the place where a field belongs.
* The schemas of both use ``$ref``, and pydantic's writes ``anyOf`` with ``null`` for an optional
  field. A CustomResourceDefinition needs a structural schema, which allows neither.
  ``api/schema/crd.py`` writes it from the same field descriptions.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdcluster_operator.api.findings import (
    FieldError,
    Rule,
    did_you_mean,
    json_errors,
    quoted,
    shown,
)
from pdcluster_operator.api.object_names import (
    API_VERSION,
    KIND,
    SCALER_KIND,
    name_errors,
    namespace_errors,
)
from pdcluster_operator.api.spec import fields as spec_fields, pod_templates, resources
from pdcluster_operator.api.spec.autoscaling_types import EngineBounds, ScalerSpec
from pdcluster_operator.api.spec.engine_types import (
    EngineOverride,
    Model,
    ModelSource,
    RoleSpec,
    SharedEngine,
)
from pdcluster_operator.api.spec.fields import FieldInfo, describe
from pdcluster_operator.api.spec.router_types import Router
from pdcluster_operator.api.spec.shared_template import with_shared
from pdcluster_operator.api.spec.types import Cluster, Role, Spec

MAX_ERRORS = 100
METADATA_FIELDS = frozenset({"labels", "annotations"})
HAVE_ARGUMENTS = frozenset({Spec, SharedEngine, EngineOverride, RoleSpec, Router})


@dataclass(frozen=True, slots=True)
class ParseResult:
    """A parsed cluster, and the errors of its manifest."""

    cluster: Cluster
    errors: tuple[FieldError, ...]


def parse_cluster(manifest: object) -> ParseResult:
    """Parse a whole manifest, which may be any JSON value. It raises nothing: faults are errors.

    Unknown fields are errors in ``spec``; ``metadata`` and ``status`` belong to Kubernetes.
    """
    reader = Reader()
    unread, manifest = _door(manifest)
    manifest, metadata = _envelope(reader, manifest, KIND, "at least spec.model.source")
    name = metadata.get("name")
    spec = with_shared(reader.read_object(Spec, manifest.get("spec", {}), "spec"))
    generation = metadata.get("generation")
    cluster = Cluster(
        name=name if isinstance(name, str) and name else "unnamed",
        namespace=_text(metadata.get("namespace")) or "default",
        uid=_text(metadata.get("uid")),
        generation=generation if isinstance(generation, int) else 0,
        spec=spec,
    )
    return ParseResult(cluster, unread or tuple(reader.errors[:MAX_ERRORS]))


def parse_scaler(manifest: object) -> tuple[ScalerSpec, tuple[FieldError, ...]]:
    """Parse the manifest of a PrefillScaler, as :func:`parse_cluster` does; return its errors."""
    reader = Reader()
    unread, manifest = _door(manifest)
    manifest, _ = _envelope(reader, manifest, SCALER_KIND, "spec: {}, or a number in spec.replicas")
    spec = reader.read_object(ScalerSpec, manifest.get("spec", {}), "spec")
    return spec, unread or tuple(reader.errors[:MAX_ERRORS])


def _door(manifest: object) -> tuple[tuple[FieldError, ...], object]:
    """Return why a manifest cannot be read, and what can be: all of it, or its names alone."""
    if not (unread := json_errors(manifest)):
        return (), manifest
    metadata = pod_templates.as_mapping(pod_templates.as_mapping(manifest).get("metadata"))
    return unread, {"metadata": {k: one for k, one in metadata.items() if isinstance(one, str)}}


def _envelope(
    reader: "Reader", manifest: object, kind: str, least: str
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Check what stands around a spec; return the manifest and its metadata."""
    if not isinstance(manifest, Mapping):
        reader.error("", manifest, Rule.WRONG_TYPE, "a manifest is an object", "Write a mapping.")
        manifest = {}
    for key, wanted in (("apiVersion", API_VERSION), ("kind", kind)):
        given = manifest.get(key)
        if given is None:
            reader.error(key, "", Rule.REQUIRED, "is missing", f"Write {key}: {wanted}.")
        elif given != wanted:
            remedy = f"Write {key}: {wanted}."
            reader.error(key, given, Rule.NOT_ALLOWED, f"must be {wanted}", remedy)
    for key in manifest:
        if key not in ("apiVersion", "kind", "metadata", "spec", "status"):
            reader.unknown("", key, ["apiVersion", "kind", "metadata", "spec"])
    metadata = manifest.get("metadata")
    if not isinstance(metadata, Mapping):
        metadata = {}
    _check_names(reader, metadata.get("name"), metadata.get("namespace"))
    if "spec" not in manifest:
        reader.error("spec", "", Rule.REQUIRED, "is missing", f"Give {least}.")
    return manifest, metadata


def _check_names(reader: "Reader", name: object, namespace: object) -> None:
    for message, remedy in name_errors(name):
        reader.error("metadata.name", name, Rule.NAME_UNUSABLE, message, remedy)
    if namespace is not None:
        for message, remedy in namespace_errors(namespace):
            reader.error("metadata.namespace", namespace, Rule.NAME_UNUSABLE, message, remedy)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


class Reader:
    """Reads values, and collects the errors in ``errors``."""

    def __init__(self) -> None:
        self.errors: list[FieldError] = []

    def error(self, path: str, value: object, rule: Rule, message: str, remedy: str) -> None:
        """Add one error; ``value`` is shown as the manifest has it."""
        write = quoted if rule is Rule.WRONG_TYPE else shown
        text = "" if value is None or (value == "" and rule is Rule.REQUIRED) else write(value)
        self.errors.append(FieldError(path or ".", text, rule, message, remedy))

    def unknown(
        self, path: str, key: object, known: Sequence[str], cls: type[Any] | None = None
    ) -> None:
        """Add the error of a field that the API does not have.

        Args:
            path: of the object that has the field.
            known: the fields of that object.
            cls: the dataclass of that object, if it is one.
        """
        remedy = where_it_belongs(path, str(key), cls) or did_you_mean(str(key), known)
        remedy = remedy or f"Known are: {', '.join(known)}."
        where = f"{path}.{key}" if path else str(key)
        self.errors.append(
            FieldError(where, "", Rule.UNKNOWN_FIELD, "is not a field of this API", remedy)
        )

    def read_object(self, cls: type[Any], value: object, path: str) -> Any:
        """Return an instance of an API dataclass, with defaults where a value is unreadable."""
        entries = self._mapping(value, path) or {}
        fields = describe(cls)
        known = [field.json_name for field in fields]
        for key in entries:
            if key not in known:
                self.unknown(path, key, known, cls)
        arguments: dict[str, Any] = {}
        for field in fields:
            here = f"{path}.{field.json_name}"
            given = entries.get(field.json_name)
            if given is not None:
                arguments[field.name] = self._read(field, given, here)
            elif field.required:
                self.error(here, "", Rule.REQUIRED, "is missing", f"Give it. It {field.doc}")
                arguments[field.name] = _placeholder(field)
        if getattr(cls, "ONE_OF", False):
            self._one_of(known, entries, path)
        return cls(**arguments)

    def _mapping(self, value: object, path: str) -> Mapping[str, Any] | None:
        if isinstance(value, Mapping):
            return value
        self.error(path, value, Rule.WRONG_TYPE, "must be an object", "Write a mapping.")
        return None

    def _one_of(self, known: Sequence[str], value: Mapping[str, object], path: str) -> None:
        given = [name for name in known if value.get(name) is not None]
        if len(given) != 1:
            self.error(
                path,
                ", ".join(given) or "nothing",
                Rule.EXACTLY_ONE,
                "needs exactly one of its fields",
                "Keep one of them." if given else f"Give one of {', '.join(known)}.",
            )

    def _read(self, field: FieldInfo, value: object, path: str) -> Any:
        readers: dict[spec_fields.Kind, Callable[[FieldInfo, object, str], Any]] = {
            "object": lambda field, value, path: self.read_object(field.item, value, path),
            "list": self._list,
            "choice": self._choice,
            "text": self._string,
            "whole": self._integer,
            "flag": self._flag,
            "quantities": self._quantities,
            "labels": self._labels,
            "free": self._free,
        }
        return readers[field.kind](field, value, path)

    def _flag(self, field: FieldInfo, value: object, path: str) -> Any:
        if isinstance(value, bool):
            return value
        self.error(path, value, Rule.WRONG_TYPE, "must be true or false", "Leave out any quotes.")
        return _placeholder(field)

    def _free(self, field: FieldInfo, value: object, path: str) -> spec_fields.Free | None:
        given = self._mapping(value, path)
        if given is not None:
            return spec_fields.Free(given)
        return None if field.optional else spec_fields.Free()

    def _choice(self, field: FieldInfo, value: object, path: str) -> Any:
        allowed = [member.value for member in field.item]
        if value in allowed:
            return field.item(value)
        remedy = did_you_mean(str(value), allowed) or f"Write {' or '.join(allowed)}."
        one = "" if len(allowed) == 1 else "one of "
        self.error(path, value, Rule.NOT_ALLOWED, f"must be {one}{', '.join(allowed)}", remedy)
        return _placeholder(field)

    def _string(self, field: FieldInfo, value: object, path: str) -> Any:
        if not isinstance(value, str):
            self.error(path, value, Rule.WRONG_TYPE, "must be a string", "Put it in quotes.")
            return _placeholder(field)
        fits = self._text_fits(field.mark(spec_fields.Text), value, path)
        return value if fits else _placeholder(field)

    def _text_fits(self, bounds: spec_fields.Text, value: str, path: str) -> bool:
        if not bounds.shortest <= len(value) <= bounds.longest:
            self.error(
                path,
                value,
                Rule.OUT_OF_RANGE,
                f"has {len(value)} characters; {bounds.shortest} to {bounds.longest} are allowed",
                "Shorten it." if value else "Give a value, or leave the field out.",
            )
            return False
        if bounds.pattern and not re.fullmatch(bounds.pattern, value):
            self.error(
                path, value, Rule.BAD_FORMAT, f"is not {bounds.says}", f"Write {bounds.says}."
            )
            return False
        return True

    def _integer(self, field: FieldInfo, value: object, path: str) -> Any:
        if isinstance(value, bool) or not isinstance(value, int):
            quoted_number = isinstance(value, str) and re.fullmatch(r"-?[0-9]+", value)
            remedy = "Leave out the quotes." if quoted_number else "Write a number."
            self.error(path, value, Rule.WRONG_TYPE, "must be a whole number", remedy)
            return _placeholder(field)
        bounds: spec_fields.Whole = field.mark(spec_fields.Whole)
        if not bounds.least <= value <= bounds.most:
            self.error(
                path,
                value,
                Rule.OUT_OF_RANGE,
                f"must be between {bounds.least} and {bounds.most}",
                f"Write a number from {bounds.least} to {bounds.most}.",
            )
            return _placeholder(field)
        return value

    def _list(self, field: FieldInfo, value: object, path: str) -> tuple[Any, ...]:
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            self.error(path, value, Rule.WRONG_TYPE, "must be a list", "Write a list.")
            return ()
        bounds: spec_fields.Items = field.mark(spec_fields.Items)
        if not bounds.least <= len(value) <= bounds.most:
            message = f"has {len(value)} items; {bounds.least} to {bounds.most} are allowed"
            remedy = "Write one, or leave the field out." if not value else "Remove some of them."
            self.error(path, "", Rule.OUT_OF_RANGE, message, remedy)
            value = value[: bounds.most]
        item = field.item_info
        items = [self._read(item, entry, f"{path}[{n}]") for n, entry in enumerate(value)]
        if bounds.key:
            names = [getattr(entry, bounds.key) for entry in items]
            for n, name in enumerate(names):
                if name and name in names[:n]:
                    where = f"{path}[{n}].{bounds.key}"
                    self.error(where, name, Rule.DUPLICATE, "is given twice", "Keep one of them.")
        return tuple(items)

    def _quantities(self, _field: FieldInfo, value: object, path: str) -> spec_fields.Quantities:
        read = spec_fields.Quantities()
        for name, amount in (self._mapping(value, path) or {}).items():
            if why := resources.why_no_amount(amount):
                remedy = "Write for example 4, 500m or 16Gi."
                self.error(f"{path}.{name}", amount, Rule.BAD_FORMAT, why, remedy)
            else:
                read[str(name)] = str(amount)
        return read

    def _labels(self, _field: FieldInfo, value: object, path: str) -> spec_fields.Labels:
        read = spec_fields.Labels()
        for key, text in (self._mapping(value, path) or {}).items():
            here = f"{path}.{key}"
            if not isinstance(text, str):
                self.error(here, text, Rule.WRONG_TYPE, "must be a string", "Put it in quotes.")
            elif self._text_fits(spec_fields.LABEL_KEY, str(key), here) and self._text_fits(
                spec_fields.LABEL_VALUE, text, here
            ):
                read[str(key)] = text
        return read


def _placeholder(field: FieldInfo) -> Any:
    """Return a value that lets parsing go on after an error."""
    if not field.required:
        return field.default
    if field.item is ModelSource:
        return ModelSource()
    if field.item is Model:
        return Model(source=ModelSource())
    if field.item is EngineBounds:
        return EngineBounds(max=1)
    if field.kind == "choice":
        return next(iter(field.item))
    return {"text": "", "whole": 1, "flag": False}[field.kind]


def where_it_belongs(path: str, key: str, cls: type[Any] | None) -> str:
    """Return the remedy for a field that belongs somewhere else; empty if it belongs nowhere.

    Args:
        path: of the object that the field was found in.
        key: the field's name.
        cls: the dataclass of that object.
    """
    if cls is None:
        return ""
    inside = [
        field.json_name
        for field in describe(cls)
        if field.kind == "object" and key in {inner.json_name for inner in describe(field.item)}
    ]
    if inside:
        places = " or ".join(f"{path}.{name}.{key}" for name in inside)
        return f"Write it as {places}."
    if issubclass(cls, EngineOverride) and key in {field.json_name for field in describe(RoleSpec)}:
        roles = (
            [path.removesuffix(".engine")]
            if path != "spec.engine"
            else [f"spec.{role}" for role in Role]
        )
        return f"Write it as {' or '.join(f'{role}.{key}' for role in roles)}."
    return _no_place(path, key, cls) or _pod_template(path, key, cls)


def _no_place(path: str, key: str, cls: type[Any]) -> str:
    """Return the remedy for a field of pods that would do harm in a pod template."""
    if cls not in HAVE_ARGUMENTS:
        return ""
    if key in pod_templates.REFUSED:
        return f"Remove it: {pod_templates.REFUSED_BECAUSE}."
    return pod_templates.extra_args_instead(path, key) if key in pod_templates.PROCESS else ""


def _pod_template(path: str, key: str, cls: type[Any]) -> str:
    container = "router" if cls is Router else "engine"
    if key in METADATA_FIELDS:
        place = f"podTemplate.metadata.{key}"
    elif key in pod_templates.FIELDS["V1PodSpec"]:
        place = f"podTemplate.spec.{key}"
    elif key in pod_templates.FIELDS["V1Container"].keys() - {"name"}:
        place = f"podTemplate.spec.containers, as {key} of the container {container}"
    else:
        return ""
    if cls in (RoleSpec, Router):
        return f"Write it as {path}.{place}."
    if issubclass(cls, EngineOverride) and path != "spec.engine":
        return f"Write it as {path.removesuffix('.engine')}.{place}."
    if issubclass(cls, EngineOverride) or cls is Spec:
        return f"Write it as spec.{place}."
    return ""
