"""The embedded synthetic world: `world.py` draws scenes, `captions.py` says what is true of them."""
