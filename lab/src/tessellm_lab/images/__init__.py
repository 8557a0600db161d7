"""Text to image in miniature: which pictures of known parts fail, and do the layers tell beforehand?"""
