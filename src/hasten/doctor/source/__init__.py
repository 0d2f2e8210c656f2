"""Reading Python source with libcst: names, flow, loops; nothing is run."""
