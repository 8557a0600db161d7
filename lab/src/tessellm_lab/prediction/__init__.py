"""Does the diagnosis on unlabelled prompts predict how often a composition is right?"""
