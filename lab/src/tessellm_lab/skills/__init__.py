"""Chains of skills in four training regimes (`experiment`), the rules beside ours, and members that end differently."""
