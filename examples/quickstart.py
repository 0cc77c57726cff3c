"""Three prompts, three pictures. Start a server first: `make serve`."""

from triton_diffusion_client import DiffusionClient, Prompt, SamplingParams

prompts: list[Prompt] = [
    "a large red circle on a blue background",
    "a small green star on a white background",
    {"prompt": "a large yellow triangle on a purple background", "negative_prompt": "a small triangle"},
]

with DiffusionClient("localhost:8001", model="shapes") as client:
    for result in client.generate(prompts, SamplingParams(num_inference_steps=20, guidance_scale=4.0, seed=7)):
        result.raise_for_error()
        assert result.receipt is not None
        print(f"{result.prompt}: one of {result.receipt.wave_size} in its wave, {result.receipt.denoise_ms:.0f} ms")
        print(*result.save("pictures"), sep="\n")
