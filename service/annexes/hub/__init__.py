"""`hallutracer bundle push` and `pull`: send a bundle to the Hugging Face hub or to a store at a
URL, and fetch it from there."""

from __future__ import annotations

from service.annexes import Annex

ANNEX = Annex(name="hub", groups={"bundle": "service.annexes.hub.command:COMMANDS"})
