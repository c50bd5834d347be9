"""`hallutracer doctor`: looks at this machine, the installation, the model and its bundles.  Starts
nothing."""

from __future__ import annotations

from service.annexes import Annex

ANNEX = Annex(
    name="doctor",
    commands={
        "doctor": (
            "service.annexes.doctor.command:doctor",
            (
                "Check that `hallutracer serve` with the same options would serve; one line for"
                " each check: ok, warn or fail."
            ),
        )
    },
    after="serve",
    tables={"doctor": "serve"},
)
