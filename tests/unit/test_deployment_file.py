"""Deploy files: vLLM-Omni's `stage_args`, and flat ones."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.test_deployment_options import make_checkpoint, plan, warnings
from triton_diffusion.errors import ConfigurationError

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a deploy file beside a checkpoint `sd3`."""
    make_checkpoint(tmp_path / "sd3")

    def write(text: str) -> Path:
        path = tmp_path / "deploy.yaml"
        path.write_text(textwrap.dedent(text))
        return path

    return write


# The form of the files that vLLM-Omni ships, with each of the keys that its diffusion stages have.
STAGE_ARGS = """
    stage_args:
      - stage_id: 0
        stage_type: diffusion
        runtime:
          process: true
          devices: "0,1"
          max_batch_size: 1
        engine_args:
          model: sd3
          model_stage: diffusion
          max_num_seqs: 4
          request_batch_max_wait_ms: 20
          step_execution: false
          enforce_eager: true
          distributed_executor_backend: "mp"
          parallel_config: {tensor_parallel_size: 1, use_hsdp: false, hsdp_shard_size: -1}
        final_output: true
        final_output_type: image
        is_comprehension: false
        default_sampling_params:
          num_inference_steps: 20
          guidance_scale: 4.5
    runtime:
      enabled: true
      defaults: {window_size: -1, max_inflight: 1}
"""


def test_a_file_of_vllm_omni_says_the_same_here(write: Write) -> None:
    path = write(STAGE_ARGS)
    (model,) = plan(None, file=path)
    assert model.name == "sd3"
    assert model.model == str(path.parent / "sd3"), "relative to the file"
    assert (model.max_num_seqs, model.request_batch_max_wait_ms, model.gpus) == (4, 20, (0, 1))
    assert model.parameters["step_execution"] == "false"
    assert model.parameters["default_sampling_params"] == '{"num_inference_steps": 20, "guidance_scale": 4.5}'
    assert [warning.split(": ")[1] for warning in warnings] == ["runtime", "stage_args[0].runtime.max_batch_size"]


def test_without_a_model_it_takes_that_of_the_command_line_as_vllm_omni_does(write: Write) -> None:
    path = write("stage_args: [{stage_type: diffusion, engine_args: {max_num_seqs: 4}}]")
    (model,) = plan(path.parent / "sd3", file=path)
    assert model.max_num_seqs == 4
    with pytest.raises(ConfigurationError, match="deploy.yaml: has no model; add one, or give MODEL"):
        plan(None, file=path)


def test_the_flat_form_is_the_options_of_one_model(write: Write) -> None:
    path = write("""
        model: ./sd3
        name: pictures
        max_num_seqs: 2
        gpus: [0, 1]
        instances: 2
        warmup_shapes: [{height: 64, width: 64}]
        pipeline_calls: {vae.enable_tiling: {}}
        require_batching: true
    """)
    (model,) = plan(None, file=path)
    assert (model.name, model.max_num_seqs, model.gpus, model.instances) == ("pictures", 2, (0, 1), 2)
    assert model.parameters == {
        "warmup_shapes": '[{"height": 64, "width": 64}]',
        "pipeline_calls": '{"vae.enable_tiling": {}}',
        "require_batching": "true",
    }


def test_several_models_have_options_of_their_own_and_the_command_line_wins(write: Write) -> None:
    path = write("""
        models:
          a: {model: sd3, max_num_seqs: 2, dtype: bfloat16}
          b: {model: sd3, diffusion_batch_size: 3}
    """)
    models = plan(None, file=path)
    assert [(model.name, model.max_num_seqs) for model in models] == [("a", 2), ("b", 3)]
    assert warnings == [f"{path}: models.b.diffusion_batch_size is deprecated; its name is models.b.max_num_seqs now"]
    models = plan(None, file=path, instances="8", dtype="float16")
    assert [model.instances for model in models] == [8, 8]
    assert models[0].parameters == {"dtype": "float16"}
    other = make_checkpoint(path.parent / "other")
    models = plan(None, f"b={other}", f"c={other}", file=path)
    assert [(model.name, Path(model.model).name, model.max_num_seqs) for model in models] == [
        ("a", "sd3", 2),
        ("b", "other", 3),
        ("c", "other", 1),
    ]
    with pytest.raises(ConfigurationError, match="holds 2 models; give --model NAME="):
        plan(other, file=path)


@pytest.mark.parametrize("name", ["max_num_seqs", "diffusion_batch_size"])
def test_the_command_line_wins_under_the_same_name_of_the_capacity_only(write: Write, name: str) -> None:
    path = write(f"{{model: sd3, {name}: 2}}")
    assert plan(None, file=path, **{name: "8"})[0].max_num_seqs == 8
    (other,) = {"max_num_seqs", "diffusion_batch_size"} - {name}
    assert plan(None, file=path, **{other: "2"})[0].max_num_seqs == 2
    message = (
        f"deploy.yaml: {name}=2 and --{other.replace('_', '-')}=8 differ, and mean the same; .*write max_num_seqs"
    )
    with pytest.raises(ConfigurationError, match=message):
        plan(None, file=path, **{other: "8"})


def test_a_flat_file_without_a_model_is_the_options_of_each(write: Write) -> None:
    path = write("{max_num_seqs: 4}")
    sd3 = path.parent / "sd3"
    models = plan(None, f"a={sd3}", f"b={sd3}", file=path)
    assert [(model.name, model.max_num_seqs) for model in models] == [("a", 4), ("b", 4)]


def test_a_flat_file_with_a_model_takes_no_other_beside_it(write: Write) -> None:
    path = write("{model: sd3, max_num_seqs: 4}")
    with pytest.raises(ConfigurationError, match=r"--model a=.*: .*deploy.yaml holds sd3 already, .*below models: in"):
        plan(None, f"a={path.parent / 'sd3'}", file=path)
    (model,) = plan(None, f"sd3={make_checkpoint(path.parent / 'other')}", file=path)
    assert (Path(model.model).name, model.max_num_seqs) == ("other", 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seq: 4", "deploy.yaml: max_num_seq: unknown option, did you mean 'max_num_seqs'"),
        ("{max_num_seqs: 4, diffusion_batch_size: 3}", "max_num_seqs=4 and .*diffusion_batch_size=3 differ"),
        ("{max_num_seqs: 4, max_num_seqs: 5}", "the key 'max_num_seqs' is there twice"),
        ("{max_num_seqs: }", "max_num_seqs=null: has no value"),
        ("{max_num_seqs: 4.5}", "max_num_seqs=4.5: must be a whole number"),
        ("{step_execution: 'yes'}", "step_execution=yes: must be true or false"),
        ("{max_num_seqs: [4]}", r"max_num_seqs=\[4\]: must be a whole number"),
        ("{max_num_seqs: 99999999999999}", "max_num_seqs=99999999999999: must be at most"),
        ("{warmup_shapes: [1, 2]}", r"warmup_shapes=\[1, 2\]: must be a JSON list of objects"),
        ("{from_pretrained: {a: 2020-01-01}}", "from_pretrained=.*date is not JSON serializable; write it in quotes"),
        ("{model: nowhere}", "deploy.yaml: nowhere: there is no such directory"),
        ("{model: [sd3]}", r'\["sd3"\]: there is no such directory'),
        ("{default_sampling_params: {heigth: 3}}", "unknown sampling parameter 'heigth', did you mean 'height'"),
        ("{http_port: 8000}", "http_port: is an option of the server; give it on the command line"),
        ("{stages: [{stage_id: 0}]}", "stages: write stage_args: a list of stages"),
        ("", "must be a map with some of these keys: stage_args, models, model, name, max_num_seqs"),
        ("[1, 2]", "must be a map"),
        ("a: b: c", "is not valid YAML"),
        ("1: 2", "1: a key must be a string"),
        ("model: !!python/object:os.system {}", "is not valid YAML"),
        ("? [1, 2]\n: 3", "is not valid YAML"),
        ("models: [a]", "models: must be a map from a name to its options"),
        ("models: {}", "models: must be a map"),
        ("{models: {a: {model: sd3}}, dtype: fp16}", "dtype: unknown beside models"),
        ("models: {a: {model: sd3, name: b}}", "models.a.name=b: the name is a already"),
        ("models: {a b: {model: sd3}}", "models.a b.name=a b: must be letters"),
        ("models: {a: {modl: sd3}}", "models.a.modl: unknown option, did you mean 'model'"),
        ("stage_args: []", "stage_args: must be a list of stages"),
        ("{stage_args: [{stage_type: diffusion}], dtype: fp16}", "dtype: unknown beside stage_args"),
        ("stage_args: [{engine_args: {}}]", r"stage_args\[0\].stage_type: is missing"),
        (
            "stage_args: [{stage_type: llm, engine_args: {}}]",
            "stage_type=llm: this server runs stages of .* diffusion",
        ),
        ("stage_args: [{stage_type: diffusion, engine_args: 3}]", "engine_args: must be a map of its keys, not 3"),
        ("stage_args: [{stage_type: diffusion, engine_args: }]", "engine_args: must be a map of its keys, not null"),
        (
            "stage_args: [{stage_type: diffusion, engine_arg: {}}]",
            "engine_arg: unknown key, did you mean 'engine_args'",
        ),
        (
            "stage_args: [{stage_type: diffusion, is_comprehension: true}]",
            "is_comprehension=True: this server runs one",
        ),
        (
            "stage_args: [{stage_type: diffusion, engine_input_source: [0]}]",
            "engine_input_source=.*one diffusion stage",
        ),
        ("stage_args: [{stage_type: diffusion, runtime: {device: 0}}]", "device: unknown key, did you mean 'devices'"),
        ("stage_args: [{stage_type: diffusion, runtime: {max_batch_size: 4}}]", "max_batch_size=4: .*max_num_seqs"),
        ("stage_args: [{stage_type: diffusion, engine_args: {max_num_seq: 4}}]", "did you mean 'max_num_seqs'"),
        ("stage_args: [{stage_type: diffusion, engine_args: {tensor_parallel_size: 2}}]", "is not split over GPUs"),
        ("stage_args: [{stage_type: diffusion, engine_args: {parallel_config: {a: 2}}}]", "is not split over GPUs"),
        ("stage_args: [{stage_type: diffusion, engine_args: {vae_use_tiling: true}}]", "vae.enable_tiling"),
        (
            "stage_args: [{stage_type: diffusion, runtime: {devices: '0'}, engine_args: {gpus: '1'}}]",
            "runtime.devices: engine_args.gpus says it too",
        ),
        (
            "stage_args: [{stage_type: diffusion, default_sampling_params: {temperature: 0.4}}]",
            "unknown sampling parameter 'temperature'",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_place_and_the_remedy(write: Write, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as failed:
        plan(None, file=write(text))
    assert "deploy.yaml" in str(failed.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere.yaml: cannot be read: No such file"):
        plan(None, file=tmp_path / "nowhere.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="binary.yaml: is no text"):
        plan(None, file=tmp_path / "binary.yaml")
