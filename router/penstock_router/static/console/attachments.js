// Images to send with the next message: from files, by drop and by paste. What is no image that the
// model sees is for the server to refuse, in its words.

import { byId, make } from "./dom.js";

export class Attachments {
  /** [{name, url}]; each URL is a data URL. */
  #images = [];
  #list = byId("attachments");
  #note = byId("attachments-note");
  #refusal;

  /** `refusal` says why images cannot be sent now; empty: they can. */
  constructor(refusal) {
    this.#refusal = refusal;
    const file = byId("file");
    byId("attach").addEventListener("click", () => file.click());
    file.addEventListener("change", async () => {
      await this.#add(file.files);
      // The same one may be chosen again.
      file.value = "";
    });
    byId("prompt").addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.#add(event.clipboardData.files);
    });
    this.#takeDrops(byId("talk"));
  }

  #takeDrops(place) {
    const show = (isOver) => place.toggleAttribute("data-dropping", isOver);
    place.addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      show(true);
    });
    place.addEventListener("dragleave", () => show(false));
    place.addEventListener("drop", (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      show(false);
      this.#add(event.dataTransfer.files);
    });
  }

  async #add(files) {
    const images = [...files].filter((file) => file.type.startsWith("image/"));
    const others = [...files].filter((file) => !images.includes(file));
    const urls = await Promise.all(images.map(read));
    this.#images.push(...images.map((file, index) => ({ name: file.name, url: urls[index] })));
    this.show(others.map((file) => `${file.name} is no image.`).join(" "));
  }

  #remove(image) {
    this.#images = this.#images.filter((other) => other !== image);
    this.show();
    byId("prompt").focus();
  }

  /** Show them again, as after another model was chosen; `words` say what was left out. */
  show(words = "") {
    this.#list.replaceChildren(...this.#images.map((image) => make("li", {}, picture(image),
      make("button", { type: "button", className: "plain", textContent: "×", title: "Remove",
        attributes: { "aria-label": `Remove ${image.name}` }, onclick: () => this.#remove(image) }))));
    this.#list.hidden = !this.#images.length;
    const note = [words, this.#images.length ? this.#refusal() : ""].filter(Boolean).join(" ");
    this.#note.textContent = note;
    this.#note.hidden = !note;
  }

  /** All of them; none are left. */
  take() {
    const images = this.#images;
    this.#images = [];
    this.show();
    return images;
  }

  get isEmpty() {
    return !this.#images.length;
  }
}

/** The content of a message: images come before the text. */
export function contentOf(text, images) {
  if (!images.length) return text;
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text.trim() ? [...parts, { type: "text", text }] : parts;
}

export function picture({ name, url }) {
  return make("img", { src: url, alt: name, title: name });
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
