"""Asks the hub for a model once, before transformers asks five times."""

from __future__ import annotations

import functools

from huggingface_hub import constants, get_hf_file_metadata, get_token, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from service.errors import ModelLoadError

CONFIG = "config.json"
TIMEOUT_S = 5.0


@functools.cache
def reachable(model: str, revision: str | None) -> bool:
    """Whether the hub has the model; False where it cannot be reached, and the model was downloaded before.

    One request in a process.  Raises ModelLoadError: the hub has no such model, or cannot be reached and nothing is
    here either.
    """
    try:
        url = hf_hub_url(model, CONFIG, revision=revision)
        get_hf_file_metadata(url, timeout=TIMEOUT_S, token=get_token())
    except GatedRepoError:
        problem = f"{model} on {constants.ENDPOINT} is gated: accept its terms there, then log in with 'hf auth login'"
    except RepositoryNotFoundError:
        problem = f"{constants.ENDPOINT} has no model {model}, or it is private: check the name, or 'hf auth login'"
    except RevisionNotFoundError:
        problem = f"{model} on {constants.ENDPOINT} has no revision {revision}"
    except EntryNotFoundError:
        problem = f"{model} on {constants.ENDPOINT} has no {CONFIG}: it is no transformers model"
    except HFValidationError:
        problem = f"{model!r} is neither a folder, a GGUF file nor a name that the hub could have"
    except Exception as error:  # connections fail in many ways, also by exceptions of the HTTP library in use
        if isinstance(try_to_load_from_cache(model, CONFIG, revision=revision), str):
            return False
        offline = isinstance(error, OfflineModeIsEnabled)
        why = "is not asked (HF_HUB_OFFLINE)" if offline else f"cannot be reached ({_last(error)})"
        problem = (
            f"{model} is no folder or GGUF file here, was not downloaded before, and {constants.ENDPOINT} {why}: "
            "check the name, or give a folder"
        )
    else:
        return True
    raise ModelLoadError(problem, param="model") from None


def _last(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[-1][:120]
