"""Where engines pay, over the sizes of a net."""
