"""Real adapters of a real pretrained model on real tasks: training them, composing them, and who else does that."""
