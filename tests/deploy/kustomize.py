"""As much of `kustomize build` as the overlays use: resources, images, replicas, JSON patches. Anything else raises."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
_KNOWN = {"apiVersion", "kind", "resources", "images", "replicas", "patches"}


def build(folder: Path) -> list[Manifest]:
    """The manifests of a folder with a kustomization.yaml."""
    said = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if unknown := set(said) - _KNOWN:
        raise NotImplementedError(f"{folder}: {unknown}")
    manifests: list[Manifest] = []
    for name in said["resources"]:
        path = folder / name
        manifests += build(path) if path.is_dir() else load(path)
    for patch in said.get("patches", ()):
        apply_patch(manifests, patch["target"], yaml.safe_load(patch["patch"]))
    for image in said.get("images", ()):
        set_image(manifests, image)
    for replicas in said.get("replicas", ()):
        (target,) = [
            each for each in manifests if each["metadata"]["name"] == replicas["name"] and "replicas" in each["spec"]
        ]
        target["spec"]["replicas"] = replicas["count"]
    return manifests


def load(path: Path) -> list[Manifest]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


def containers(manifest: Manifest) -> list[Manifest]:
    found: list[Manifest] = manifest.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])
    return found


def set_image(manifests: list[Manifest], image: dict[str, str]) -> None:
    hit = [container for each in manifests for container in containers(each) if container["image"] == image["name"]]
    if not hit:
        raise KeyError(f"no container has the image {image['name']}")
    for container in hit:
        container["image"] = f"{image['newName']}:{image['newTag']}"


def apply_patch(manifests: list[Manifest], target: dict[str, str], operations: list[dict[str, Any]]) -> None:
    """Raises KeyError when nothing is patched."""
    hit = [each for each in manifests if matches(each, target)]
    if not hit:
        raise KeyError(f"nothing is {target}")
    for manifest in hit:
        for operation in operations:
            add(manifest, operation)


def matches(manifest: Manifest, target: dict[str, str]) -> bool:
    return (
        manifest["kind"] == target["kind"]
        and target.get("name", manifest["metadata"]["name"]) == manifest["metadata"]["name"]
    )


def add(manifest: Manifest, operation: dict[str, Any]) -> None:
    """RFC 6902's `add`."""
    if operation["op"] != "add":
        raise NotImplementedError(operation["op"])
    *way, last = operation["path"].removeprefix("/").split("/")
    place: Any = manifest
    for step in way:
        place = place[int(step) if isinstance(place, list) else step]
    value = copy.deepcopy(operation["value"])
    match place:
        case list():
            place.insert(len(place) if last == "-" else int(last), value)
        case _:
            place[last] = value
