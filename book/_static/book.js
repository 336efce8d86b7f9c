// A figure that is wider than its column scrolls sideways: then the keyboard must reach it, and a screen reader say what it is.
function markFrames() {
  document.querySelectorAll(".figure-frame").forEach((frame, index) => {
    if (frame.scrollWidth > frame.clientWidth + 1) {
      const number = frame.closest("figure")?.querySelector(".caption-number")?.textContent.trim() ?? `Figure ${index + 1} of this page`;
      frame.tabIndex = 0;
      frame.setAttribute("role", "region");
      frame.setAttribute("aria-label", `${number}, scrolls sideways`);
    } else {
      for (const name of ["tabindex", "role", "aria-label"]) frame.removeAttribute(name);
    }
  });
}
window.addEventListener("load", markFrames);
window.addEventListener("resize", markFrames);
