"""One network trained on many combinations of task modules: when does it master the combinations it never saw?"""
