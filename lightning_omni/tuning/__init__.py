"""The tuning of a run: models of its time, the search, the callbacks that apply it, reports, and one device."""
