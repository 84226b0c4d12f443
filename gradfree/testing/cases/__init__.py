"""The small models that engines are tried on."""
