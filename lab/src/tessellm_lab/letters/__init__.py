"""Letter replacement: the paper's form and as generation (`experiment`), and with many experts (`many_experts`)."""
