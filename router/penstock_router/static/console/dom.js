// Elements, made and changed. Everything that is shown is set as text, never as HTML: what a model
// says is hostile.

export const byId = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";

/** An element with these properties; children are elements or texts, null ones are left out. */
export function make(tag, properties = {}, ...children) {
  const { attributes = {}, data = {}, ...rest } = properties;
  const element = Object.assign(document.createElement(tag), rest);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  Object.assign(element.dataset, data);
  element.append(...children.filter((child) => child !== null));
  return element;
}

export function makeSvg(tag, attributes = {}) {
  const element = document.createElementNS(SVG, tag);
  setAttributes(element, attributes);
  return element;
}

/** Set what differs: an attribute that is set anew is laid out anew. */
export function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    const text = String(value);
    if (element.getAttribute(name) !== text) element.setAttribute(name, text);
  }
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Say something to who listens to the page instead of looking at it. */
export function announce(text) {
  byId("announce").textContent = text;
}
