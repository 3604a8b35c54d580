"""Building blocks of reports: tables (table), figures (figures; need matplotlib) and one self-contained page (page)."""
