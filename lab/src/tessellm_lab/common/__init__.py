"""What experiments share: training in stacks, claims and results, figures, the list of all experiments."""
