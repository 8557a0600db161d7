"""What a composition does, made visible: measurements on its members and their outputs."""
