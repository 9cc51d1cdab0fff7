"""Integer programs of small steps, solved by HiGHS: `milp` writes them, `oracle` is what planners are compared with."""
