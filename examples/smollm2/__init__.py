"""SmolLM2-135M-Instruct generating text from a packed `nvfp4_ds_mla` cache; run `chat.py`."""
