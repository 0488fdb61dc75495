"""A small DeepSeek-V3.2-shaped decoder over a packed `nvfp4_ds_mla` cache; run `run.py`."""
