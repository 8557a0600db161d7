"""Twenty adapters of a real base: how well prompts reach the right one, beside other routers."""
