"""The tuning of a run (models of its time, the search, callbacks that apply it, reports), and of one device."""
