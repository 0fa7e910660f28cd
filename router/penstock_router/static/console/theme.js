// Light, dark, or as the system has it: set before anything is drawn. Loaded as a plain script, so
// that the page never shows in the other colours first.
"use strict";
(() => {
  const NAMES = ["auto", "light", "dark"];
  // A browser may keep pages from storing anything.
  const stored = () => {
    try {
      return localStorage.getItem("penstock-theme");
    } catch {
      return null;
    }
  };
  const show = (name) => {
    document.documentElement.dataset.theme = NAMES.includes(name) ? name : "auto";
  };
  show(stored());
  document.addEventListener("DOMContentLoaded", () => {
    const select = document.getElementById("theme");
    select.value = document.documentElement.dataset.theme;
    select.addEventListener("change", () => {
      show(select.value);
      try {
        localStorage.setItem("penstock-theme", select.value);
      } catch {
        // It holds for this page.
      }
    });
  });
})();
