"""Writes docs/reference.md: every field, output, parameter and error, from the tables that the code itself uses."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from triton_diffusion import errors
from triton_diffusion.config import PARAMETERS
from triton_diffusion.deployment import MODEL_OPTIONS
from triton_diffusion.deployment.stage import ENGINE_KEYS, RUNTIME_KEYS, STAGE_KEYS
from triton_diffusion.metric import BASE_LABELS, METRICS, MOST_KEYS, OTHER_KEYS
from triton_diffusion.outcome import OUTCOMES
from triton_diffusion.python_backend.triton_outputs import OUTPUTS
from triton_diffusion.request import BATCH_KEY, FIELDS
from triton_diffusion.sampling_params import SamplingParams
from triton_diffusion.sampling_params_key import STRICT_FIELDS


def render() -> str:
    """The reference as Markdown."""
    return f"""# Reference

Written by `make docs` from the tables that the code itself uses.

## Inputs

Each may be an input tensor or a request parameter of the same name; a tensor counts before a parameter, and that
before the model's default. Triton batches only requests with the same set of tensors, so a parameter is the better
choice for what differs between requests. Shapes are without the batch dimension, which is 1. A pipeline takes a
field if its call has the argument in the last column.

{_inputs()}

`{BATCH_KEY}` (TYPE_UINT8, [0, h1, h2]) is optional and has no elements: its shape carries a hash of the sampling
parameters, so that Triton's dynamic batcher puts requests together that can share a forward pass.

## What may differ inside one forward pass

Everything but the key of the pipeline's adapter; requests of other pipelines run one at a time.

{_keys()}

With `strict_batch_key`, requests are fused only if these are equal: {", ".join(STRICT_FIELDS)}.

## Outputs

Only what a request names is made. A request that names none, or all, gets `generated_image`, `seed_used` and
`receipt`.

{_outputs()}

## Parameters of config.pbtxt

`max_batch_size` is the most requests of a wave (`max_num_seqs`), and `dynamic_batching.max_queue_delay_microseconds`
is how long the first of them waits for company (`request_batch_max_wait_ms`). The rest are `parameters`:

{_parameters()}

## Options of serve and init, keys of a deploy file

Each parameter above is also an option of `triton-diffusion serve` and `init` (`--max-pixels`, and `--warmup` or
`--no-warmup` where it is true or false), and a key of a deploy file (`max_pixels`). So are these:

{_options()}

The command line wins over a deploy file. But `max_num_seqs` in one and a different `diffusion_batch_size` in the other
is an error, since they are two names of one value.

`serve` also takes options of the server (`triton-diffusion serve --help`); what they do not say,
`--triton-option NAME=VALUE` gives to tritonserver as it is, once for each: `--triton-option trace-config=rate=1`.

A deploy file holds these keys for one model (without `model`, for each `--model`); or `models`, with the keys of each
model below its name; or vLLM-Omni's
`stage_args`, a list of stages with the keys in `engine_args`. Of what else such a stage may say, `runtime.devices` is
`gpus`, `runtime.num_replicas` is `instances`, `default_sampling_params` is itself, and the rest is taken where it says
what is so here anyway:

{_stage_keys()}

## Metrics

On Triton's metrics endpoint, each with the labels {" and ".join(f"`{name}`" for name in BASE_LABELS)}; how to read
them: [observability.md](observability.md). `key` has at most {MOST_KEYS} different values; requests of further keys
are counted as `{OTHER_KEYS}`. `reason` is the class of the error, below.

{_metrics()}

{_outcomes()}

## Errors

```
{(errors.__doc__ or "").strip()}
```
"""


def _inputs() -> str:
    return _table(
        ("name", "Triton type", "shape", "allowed", "", "argument of the pipeline"),
        (
            (
                f"`{field.name}`",
                field.triton_type,
                str(field.dims),
                field.allowed,
                field.description + (" Required." if field.required else ""),
                f"`{field.argument}`" if field.argument else "every pipeline takes it",
            )
            for field in FIELDS.values()
        ),
    )


def _outputs() -> str:
    return _table(
        ("name", "Triton type", "shape", ""),
        ((f"`{name}`", output.triton_type, str(output.dims), output.description) for name, output in OUTPUTS.items()),
    )


def _keys() -> str:
    # Imported here, since it brings torch and diffusers along.
    from triton_diffusion.adapters.loading import ADAPTERS

    return _table(
        ("pipeline", "key", "because"),
        (
            (f"`{pipeline}`", f"`{name}`", reason)
            for pipeline, adapter in ADAPTERS.items()
            for name, reason in adapter.key_fields.items()
        ),
    )


def _parameters() -> str:
    return _table(
        ("name", "default", ""),
        (
            (f"`{name}`", _default(attribute.default), attribute.metadata["description"])
            for name, attribute in PARAMETERS.items()
        ),
    )


def _options() -> str:
    return _table(
        ("option", "key", ""),
        (
            (f"`{option.flag}`", f"`{name}`", option.description)
            for name, option in MODEL_OPTIONS.items()
            if name not in PARAMETERS
        ),
    )


def _stage_keys() -> str:
    places = {"": STAGE_KEYS, "runtime.": RUNTIME_KEYS, "engine_args.": ENGINE_KEYS}
    return _table(
        ("key of a stage", "may be", "otherwise"),
        (
            (
                f"`{place}{name}`",
                ", ".join(f"`{json.dumps(value)}`" for value in key.allowed) or "anything",
                key.remedy,
            )
            for place, keys in places.items()
            for name, key in keys.items()
        ),
    )


def _metrics() -> str:
    return _table(
        ("name", "type", "further labels", ""),
        (
            (f"`{name}`", metric.kind, " ".join(f"`{label}`" for label in metric.labels), metric.description)
            for name, metric in METRICS.items()
        ),
    )


def _outcomes() -> str:
    return _table(("outcome", "the request"), ((f"`{name}`", meaning) for name, meaning in OUTCOMES.items()))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def _default(value: object) -> str:
    if value == "":
        return ""
    if value == ():
        return "`[]`"
    if isinstance(value, SamplingParams) or not isinstance(value, (str, int, float)):
        return "`{}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render())
