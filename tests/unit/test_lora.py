"""What a request wants, which adapters there are, and which of them are on the device: all without torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_diffusion.errors import ConfigurationError, FieldValueError
from triton_diffusion.lora import BASE, Loras, LoraSelection
from triton_diffusion.lora.device_cache import DeviceCache
from triton_diffusion.lora.files import LoraFiles, find_loras
from triton_diffusion.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("lora", "lora_scale", "selected"),
    [
        (None, None, ""),
        ("", None, ""),
        ("ink", None, "ink:1"),
        ("ink", 0.5, "ink:0.5"),
        (" ink : 0.8 , night:0.3 ", None, "ink:0.8,night:0.3"),
        ("night:0.3,ink:0.8", 0.5, "ink:0.4,night:0.15"),
        ("ink:-2", None, "ink:-2"),
        ("ink:0,night", None, "night:1"),
        ("ink", 0.0, ""),
    ],
)
def test_a_request_names_adapters_with_their_scales(lora: str | None, lora_scale: float | None, selected: str) -> None:
    assert str(LoraSelection.of(SamplingParams(lora=lora, lora_scale=lora_scale))) == selected


@pytest.mark.parametrize("lora", [",", "ink,", ":0.5", "ink:", "ink:much", "ink:nan", "ink:inf", "ink:101", "ink:1:2"])
def test_what_is_no_list_of_adapters_is_refused_with_an_example(lora: str) -> None:
    with pytest.raises(FieldValueError, match=r"lora=.*must be names of adapters.*'ink:0.8,night:0.3'"):
        LoraSelection.of(SamplingParams(lora=lora))


def test_a_scale_is_the_same_however_it_came() -> None:
    fp32 = 0.800000011920929  # what 0.8 is in a tensor of FP32
    assert LoraSelection.of(SamplingParams(lora="ink", lora_scale=fp32)) == LoraSelection.of(
        SamplingParams(lora="ink:0.8")
    )


def test_two_scales_do_not_multiply_beyond_the_bounds() -> None:
    with pytest.raises(FieldValueError, match=r"lora='ink:100' lora_scale=100: ink has the scale 10000; must be from"):
        LoraSelection.of(SamplingParams(lora="ink:100", lora_scale=100.0))


@pytest.mark.parametrize(("lora", "lora_scale"), [("who:0", None), ("who", 0.0), ("ink,who:0", None)])
def test_a_name_is_checked_whatever_its_scale(lora: str, lora_scale: float | None) -> None:
    with pytest.raises(FieldValueError, match="there is no adapter 'who'"):
        Loras(["ink"]).check(SamplingParams(lora=lora, lora_scale=lora_scale), SamplingParams())


def test_an_adapter_is_named_once() -> None:
    with pytest.raises(FieldValueError, match="names 'ink' twice"):
        LoraSelection.of(SamplingParams(lora="ink:0.5,ink"))


def test_an_unknown_adapter_is_refused_with_those_that_there_are() -> None:
    loras = Loras(["ink", "night"])
    loras.check(SamplingParams(lora="night:0.5,ink"), SamplingParams())
    with pytest.raises(FieldValueError, match=r"no adapter 'nigth'.*did you mean 'night'\? Known are: ink, night"):
        loras.check(SamplingParams(lora="ink,nigth"), SamplingParams())
    with pytest.raises(FieldValueError, match=r"this model has no adapters \(lora_directory in config.pbtxt\)"):
        Loras().check(SamplingParams(lora="ink"), SamplingParams())


@pytest.mark.parametrize("lora", ["../ink", "/etc/passwd", "ink/..", "ink.safetensors"])
def test_a_name_is_never_a_path(lora: str) -> None:
    with pytest.raises(FieldValueError, match="there is no adapter"):
        Loras(["ink"]).check(SamplingParams(lora=lora), SamplingParams())


def test_a_scale_without_an_adapter_is_a_mistake_unless_it_is_the_models_default() -> None:
    loras = Loras(["ink"])
    with pytest.raises(FieldValueError, match=r"lora_scale=0.5: scales an adapter: name it in lora"):
        loras.check(SamplingParams(lora_scale=0.5), SamplingParams())
    loras.check(SamplingParams(lora_scale=0.5), SamplingParams(lora_scale=0.5))
    loras.check(SamplingParams(lora="", lora_scale=0.5), SamplingParams())  # none, on purpose


def test_equal_wishes_are_equal_in_the_key_and_no_wish_is_none() -> None:
    one, other = (LoraSelection.of(SamplingParams(lora=lora)) for lora in ("a:0.5,b", "b:1,a:0.50"))
    assert Loras().key(one) == Loras().key(other) == "a:0.5,b:1"
    assert Loras().key(BASE) is None


def make_directory(path: Path, *files: str) -> Path:
    for name in files:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch()
    return path


def test_each_folder_and_each_file_is_an_adapter(tmp_path: Path) -> None:
    directory = make_directory(
        tmp_path,
        "ink.safetensors",
        "night.v2/pytorch_lora_weights.safetensors",
        "night.v2/checkpoint-500.safetensors",
        "old/only.safetensors",
        "wan/low_noise_model.safetensors",
        "wan/high_noise_model.safetensors",
        "two/style-low_noise.safetensors",
        "two/style-high_noise.safetensors",
        "README.md",
        ".cache/x.safetensors",
    )
    assert find_loras(str(directory), {}, Path()) == [
        LoraFiles("ink", str(directory), ("ink.safetensors",)),
        LoraFiles("night.v2", str(directory / "night.v2"), ("pytorch_lora_weights.safetensors",)),
        LoraFiles("old", str(directory / "old"), ("only.safetensors",)),
        LoraFiles("two", str(directory / "two"), ("style-high_noise.safetensors", "style-low_noise.safetensors")),
        LoraFiles("wan", str(directory / "wan"), ("high_noise_model.safetensors", "low_noise_model.safetensors")),
    ]


def test_adapters_may_be_listed_by_name_too(tmp_path: Path) -> None:
    make_directory(tmp_path, "ink.safetensors", "styles/night.safetensors")
    found = find_loras("", {"night": "./styles", "ink": "ink.safetensors", "hub": "someone/some-lora"}, tmp_path)
    assert [(each.name, each.weights) for each in found] == [
        ("hub", ()),
        ("ink", ("ink.safetensors",)),
        ("night", ("night.safetensors",)),
    ]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["evil.PT"], r"lora 'evil.PT': .*evil.PT is a pickle"),
        (["Ink.SAFETENSORS"], r"lora 'Ink.SAFETENSORS': .*is not a .safetensors file"),
        (["ink.bin"], r"lora 'ink.bin': .*ink.bin is a pickle, which may run code: convert it to .safetensors"),
        (["ink/adapter.pt"], r"lora 'ink': .*adapter.pt is a pickle"),
        (["ink/README.md"], r"lora 'ink': there is no .safetensors file in .*ink"),
        (["ink/a.safetensors", "ink/b.safetensors"], r"holds a.safetensors, b.safetensors: keep one of them"),
        (["my style.safetensors"], r"lora 'my style': a name is made of letters"),
        (["a:b.safetensors"], r"lora 'a:b': a name is made of letters"),
        (["ink.safetensors", "ink/ink.safetensors"], r"lora 'ink': there are two of that name"),
    ],
)
def test_what_cannot_be_an_adapter_is_named_at_load(tmp_path: Path, files: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        find_loras(str(make_directory(tmp_path, *files)), {}, Path())


@pytest.mark.parametrize(
    ("directory", "loras", "message"),
    [
        ("missing", {}, r"lora_directory: .*missing is not a directory"),
        ("", {"ink": "./missing"}, r"parameter loras: 'ink': there is no .*missing"),
        ("", {"ink": "missing.safetensors"}, r"parameter loras: 'ink': there is no .*missing.safetensors"),
        ("", {"../ink": "someone/some-lora"}, r"lora '../ink': a name is made of letters"),
    ],
)
def test_a_wrong_list_is_named_at_load(tmp_path: Path, directory: str, loras: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        find_loras(directory, loras, tmp_path)


SIZES = {"a": 1, "b": 2, "c": 3, "d": 4}


@given(
    budget=st.integers(0, 12),
    needs=st.lists(st.lists(st.sampled_from(sorted(SIZES)), unique=True, max_size=3), max_size=30),
)
def test_the_device_holds_what_is_needed_and_otherwise_no_more_than_its_budget(
    budget: int, needs: list[list[str]]
) -> None:
    on_device: set[str] = set()
    last_needed = dict.fromkeys(SIZES, -1)
    largest = 0

    def bring(name: str) -> None:
        nonlocal largest
        assert name not in on_device
        on_device.add(name)
        largest = max(largest, sum(SIZES[name] for name in on_device))

    cache = DeviceCache(SIZES, budget, bring, on_device.remove)
    for time, names in enumerate(needs):
        before = set(on_device)
        largest = 0
        cache.need(names)
        last_needed.update(dict.fromkeys(names, time))
        assert set(names) <= on_device == set(cache.present)
        assert largest <= max(budget, sum(SIZES[name] for name in names)), "room is made before it is taken"
        gone, kept = before - on_device, (before & on_device) - set(names)
        if gone and kept:
            latest_gone = max(last_needed[name] for name in gone)
            assert latest_gone <= min(last_needed[name] for name in kept), "the least recently used went first"
