"""Devices by their names."""

from collections.abc import Sequence
from typing import TypeAlias

import jax

Device: TypeAlias = str | jax.Device


def find_devices(devices: Sequence[Device] | None, mesh: jax.sharding.Mesh | None) -> list[jax.Device]:
    """The devices that a list or a mesh names; none where neither is given.

    Raises:
      ValueError: both are given, the list is empty or names a device twice, or there is no such device.
    """
    if devices is None:
        return [] if mesh is None else list(mesh.local_devices)
    places = [] if isinstance(devices, str) else [find_device(device) for device in devices]
    if mesh is not None or not places or len(set(places)) < len(places):
        raise ValueError(f"{devices=} and {mesh=}; expected a list of one device or more, each once, or a mesh")
    return places


def find_device(device: Device) -> jax.Device:
    """The device of a name such as "cpu" or "cuda:1"; ValueError where there is none."""
    if not isinstance(device, str):
        return device
    platform, _, index = device.partition(":")
    try:
        return jax.devices(platform)[int(index or 0)]
    except (RuntimeError, IndexError, ValueError) as error:
        names = [f"{d.platform}:{d.id}" for d in jax.devices()]
        raise ValueError(f"{device=} is not there; expected one of {names}") from error
